"""What has to be known of a GPU, in one command: python -m benchmarks.gpu --minutes 9 [--device cpu]"""
