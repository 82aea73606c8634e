# Tandem with vLLM on NVIDIA GPUs. From the root of the repository: docker build -f docker/cuda.Dockerfile -t tandem:cuda .
# Python and CUDA's compiler come with the base image; torch brings the CUDA libraries that it is built for.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# A newer patch of Ubuntu's is as good: pinning would only make the build fail once it is replaced.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && usermod --login tandem --home /home/tandem --move-home ubuntu

ENV PATH=/opt/venv/bin:$PATH

WORKDIR /opt/tandem
COPY pyproject.toml README.md LICENSE ./
COPY libs libs
COPY services services
# The distribution says itself which releases it takes.
# hadolint ignore=DL3013
RUN pip install ".[vllm,megatron]"

USER 1000
WORKDIR /workspace
ENTRYPOINT []
CMD ["coordinator", "--help"]
