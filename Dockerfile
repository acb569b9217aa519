# OctetRL on NVIDIA GPUs. Needs a driver of version 580 or newer and the NVIDIA Container Toolkit.
#
#   docker build -t octetrl .
#   docker run --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/work" octetrl train recipe.yaml
#
# torch brings its own CUDA libraries, so the base image is the small one. Triton compiles launchers at run time: it
# needs a C compiler and Python's headers.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        python3.12 python3.12-venv python3.12-dev gcc libc6-dev git bubblewrap ca-certificates \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/venv/bin:$PATH
RUN python3.12 -m venv /venv \
    && pip install torch==2.11.0 \
    && python -c "import torch; assert torch.version.cuda.startswith('13.'), torch.version.cuda"

# The tested versions; torch and the Triton that it asks for are installed already.
COPY constraints.txt /src/
RUN sed -i '/^torch==/d; /^triton==/d' /src/constraints.txt

COPY pyproject.toml setup.py README.md LICENSE /src/
COPY recipes /src/recipes
COPY octetrl /src/octetrl
ARG EXTRAS=serve,ray,judge,search,parquet,datasets,wandb
RUN pip install "/src[$EXTRAS]" -c /src/constraints.txt && octetrl --version

# The commit that run.json names: docker build --build-arg COMMIT=$(git rev-parse --short HEAD)
ARG COMMIT=
ENV OCTETRL_COMMIT=$COMMIT

# Caches of models and kernels; any user may write there, so `--user` works. Mount /cache to keep them.
RUN useradd --create-home --uid 10001 octetrl && mkdir -p /cache /work && chmod 1777 /cache && chown octetrl /work
ENV HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton HOME=/cache LOGNAME=octetrl
USER 10001
WORKDIR /work
ENTRYPOINT ["octetrl"]
CMD ["--help"]
