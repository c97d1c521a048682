# specjax for one kind of machine: docker build --build-arg EXTRAS=tpu -t specjax .
# EXTRAS are extras of pyproject.toml: tpu for TPU VMs, cuda12 or cuda13 for NVIDIA GPUs, several with commas between them.
FROM python:3.12-slim

ARG EXTRAS=tpu
WORKDIR /opt/specjax
COPY . .
RUN pip install --no-cache-dir ".[${EXTRAS}]"

WORKDIR /data
ENTRYPOINT ["specjax"]
