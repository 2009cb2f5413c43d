# deepytorch on CPUs, from its wheel, with the adapter compiled for the torch in it.
#
#   docker build -t deepytorch .                              makes the wheel from this checkout
#   docker build --build-arg WHEEL=dist -t deepytorch .       takes that of `make wheel` in dist
#   docker run --rm --shm-size 2g deepytorch train llama_sft --nproc-per-node 2 steps=4
#
# GPU kernels are in wheels that were made beside nvcc, as a release's are: WHEEL=dist, and for
# torch's CUDA build TORCH_INDEX=https://download.pytorch.org/whl/cu130.
ARG WHEEL=checkout

FROM python:3.12-slim AS tools
# Whichever compiler this Debian has.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

FROM tools AS checkout
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps -w /wheel .

FROM scratch AS dist
COPY dist/*-cp312-*.whl /wheel/

# hadolint ignore=DL3006
FROM ${WHEEL} AS wheel

FROM tools AS build
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY --from=wheel /wheel /wheel
COPY constraints.txt /
# torch first and by itself, so that it is this build of it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 && \
    pip install --no-cache-dir -c /constraints.txt "$(echo /wheel/*.whl)[recipes]"
# Beside the package, where a released wheel has it: root's, and any user may load it.
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
