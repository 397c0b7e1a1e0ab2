# docker build -f docker/cuda.Dockerfile -t skipstone:cuda .
# docker run --rm --init --gpus 1 -p 127.0.0.1:8000:8000 -v /models:/models:ro -v skipstone-cache:/home/skipstone/.triton \
#     -e SKIPSTONE_API_KEY=... skipstone:cuda serve /models/MODEL
FROM python:3.12-slim

# torch's wheel brings CUDA and Triton, the host its driver; Triton compiles small launchers with gcc when it starts.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "torch>=2.11"
COPY . /src
RUN pip install --no-cache-dir "/src[serve,structured,bench]" && rm -rf /src

# A volume over the cache takes its owner from this folder.
RUN useradd --create-home skipstone && install -d -o skipstone /home/skipstone/.triton
USER skipstone
WORKDIR /home/skipstone
ENV SKIPSTONE_HOST=0.0.0.0 SKIPSTONE_PORT=8000 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
HEALTHCHECK --start-period=600s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["skipstone"]
CMD ["serve", "demo", "--device", "cuda"]
