# jaxft with the versions of constraints.txt. For the CPU, and for NVIDIA GPUs, whose CUDA comes with the extra:
#     docker build -t jaxft .
#     docker build -t jaxft-cuda --build-arg EXTRAS=serve,parquet,cuda .
#     docker run --rm --gpus all -v "$PWD:/work" jaxft-cuda finetune --config-file run.yml
FROM python:3.12-slim
ARG EXTRAS=serve,parquet
WORKDIR /opt/jaxft
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY jaxft ./jaxft
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"
WORKDIR /work
ENTRYPOINT ["jaxft"]
CMD ["doctor"]
