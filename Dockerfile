# docker build -t smoe . && docker run --rm -it -v "$PWD/runs:/smoe/runs" smoe make demo
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /smoe
COPY . .
RUN make setup
ENV PATH="/smoe/.venv/bin:$PATH"
CMD ["smoe", "--help"]
