"""Many runs: make them, keep their results, and report what they show."""
