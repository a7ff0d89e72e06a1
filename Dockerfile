# docker build -t handful . && docker run --gpus all --shm-size 8g handful grpo.py
# The CUDA libraries come with torch's wheels; Triton compiles a launcher, so a compiler is needed.
# NVIDIA's container toolkit brings the driver and nvidia-smi when the image is run.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ numactl \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /handful
COPY launch.sh pyproject.toml ./
COPY tools tools
RUN PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 bash launch.sh --gpu python -c ""
COPY *.py README.md LICENSE ./
COPY examples examples
COPY benchmarks benchmarks
COPY tests tests
ENTRYPOINT ["bash", "launch.sh"]
