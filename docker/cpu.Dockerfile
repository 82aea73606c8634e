# Tandem on CPUs. From the root of the repository: docker build -f docker/cpu.Dockerfile -t tandem:cpu .
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# torch's build for CPUs is a tenth of the one for CUDA; what follows finds it installed.
RUN pip install --index-url https://download.pytorch.org/whl/cpu "torch>=2.13,<2.14"

WORKDIR /opt/tandem
COPY pyproject.toml README.md LICENSE ./
COPY libs libs
COPY services services
# The distribution says itself which releases it takes.
# hadolint ignore=DL3013
RUN pip install ".[megatron]" \
    && useradd --create-home --uid 1000 tandem

USER 1000
WORKDIR /workspace
ENTRYPOINT []
CMD ["coordinator", "--help"]
