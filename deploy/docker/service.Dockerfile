# syntax=docker/dockerfile:1
# One image for every process; the command decides which one it is.
#   docker build -f deploy/docker/service.Dockerfile -t opengyre .
#   docker build -f deploy/docker/service.Dockerfile -t opengyre:cuda --build-arg TORCH=cuda .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# cpu, cuda (the build PyPI serves), or any backend uv knows (cu128, rocm6.4 ...)
ARG TORCH=cpu
ENV UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 VIRTUAL_ENV=/opt/gyre
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt uv && python -m venv --without-pip "$VIRTUAL_ENV"
# A layer of its own: it is by far the largest and changes with the pins alone.
RUN pin=$(grep '^torch==' constraints.txt) \
    && if [ "$TORCH" = cuda ]; then uv pip install -c constraints.txt "$pin"; \
       else uv pip install -c constraints.txt --torch-backend="$TORCH" "$pin"; fi
COPY libs libs
COPY services services
# pytest is what one of the graders runs (opengyre-reward[pytest]).
RUN uv pip install -c constraints.txt -b constraints.txt ./libs/* ./services/* pytest

FROM python:${PYTHON}-slim-bookworm
LABEL org.opencontainers.image.title="OpenGyre" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --home-dir /var/lib/gyre --create-home gyre
COPY --from=build /opt/gyre /opt/gyre
COPY LICENSE /opt/gyre/LICENSE
COPY examples /opt/gyre/examples
# One torch thread per process: many share a machine, and a busy neighbour makes a second thread slower than none.
ENV PATH=/opt/gyre/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
USER 10001
WORKDIR /var/lib/gyre
VOLUME /var/lib/gyre
STOPSIGNAL SIGTERM
CMD ["gyre", "--help"]
