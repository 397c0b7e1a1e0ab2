# docker build -f docker/cpu.Dockerfile -t skipstone:cpu .
# docker run --rm --init -p 127.0.0.1:8000:8000 -e SKIPSTONE_API_KEY=... skipstone:cpu
FROM python:3.12-slim

# The wheel without CUDA, so that the image stays below 1.5 GB.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.11"
COPY . /src
RUN pip install --no-cache-dir "/src[cpu,serve,structured,bench]" && rm -rf /src

RUN useradd --create-home skipstone
USER skipstone
WORKDIR /home/skipstone
# Compile the CPU kernels now; another kind of processor compiles them again.
RUN python -c "from skipstone.kernels.ops import load_ops; load_ops('numba')"
ENV SKIPSTONE_HOST=0.0.0.0 SKIPSTONE_PORT=8000
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["skipstone"]
CMD ["serve", "demo"]
