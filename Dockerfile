# deepytorch on CPUs, with the adapter compiled for the torch in it. For GPUs start from an image
# with CUDA's compiler, such as nvidia/cuda:13.0.0-devel-ubuntu24.04, and torch's CUDA build.
#
#   docker build -t deepytorch .
#   docker run --rm --shm-size 2g deepytorch train llama_sft --nproc-per-node 2 steps=4
FROM python:3.12-slim AS build
# Whichever compiler this Debian has.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH DEEPYTORCH_CACHE_DIR=/opt/deepytorch
WORKDIR /src
COPY . .
# torch first and by itself, so that it is this build of it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 && \
    pip install --no-cache-dir -c constraints.txt ".[recipes]" && \
    deepytorch build

# No compiler here: the adapter comes compiled.
FROM python:3.12-slim
COPY --from=build /opt /opt
ENV PATH=/opt/venv/bin:$PATH DEEPYTORCH_CACHE_DIR=/opt/deepytorch
WORKDIR /train
ENTRYPOINT ["deepytorch"]
CMD ["report"]
