# deepytorch on CPUs, with the adapter compiled for the torch in it. For GPUs start from an image
# with CUDA's compiler, such as nvidia/cuda:13.0.0-devel-ubuntu24.04, and torch's CUDA build.
#
#   docker build -t deepytorch .
#   docker run --rm --shm-size 2g deepytorch train llama_sft --nproc-per-node 2 steps=4
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ENV DEEPYTORCH_CACHE_DIR=/opt/deepytorch
# --user: one folder to copy. torch first, so that its version is the pinned one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --user --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 && \
    pip install --user --no-cache-dir -c constraints.txt ".[recipes]" && \
    /root/.local/bin/deepytorch build

# No compiler here: the adapter comes compiled.
FROM python:3.12-slim
COPY --from=build /root/.local /root/.local
COPY --from=build /opt/deepytorch /opt/deepytorch
ENV PATH=/root/.local/bin:$PATH DEEPYTORCH_CACHE_DIR=/opt/deepytorch
WORKDIR /work
ENTRYPOINT ["deepytorch"]
CMD ["report"]
