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
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY . .
# torch first and by itself, so that it is this build of it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 && \
    pip install --no-cache-dir -c constraints.txt ".[recipes]"
# Beside the package, where a released wheel has it: root's, and any user may load it.
WORKDIR /
RUN folder="$(python -c 'import deepytorch_core; print(*deepytorch_core.__path__)')/_prebuilt" && \
    deepytorch build --output "$folder" && chmod -R a+rX,go-w "$folder"

# No compiler here: the adapter comes compiled. No root either: --user may name any other number.
FROM python:3.12-slim
COPY --from=build /opt /opt
RUN useradd --uid 10001 --create-home trainer && install -d -o trainer -g trainer /train
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /train
USER 10001
ENTRYPOINT ["deepytorch"]
CMD ["report"]
