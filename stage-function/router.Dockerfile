# Routers of pipelines, which carry no torch. Built from the repository's root:
#   docker build -f stage-function/router.Dockerfile -t ghcr.io/keystage/router:0.1.0 .
ARG PYTHON_VERSION=3.12
ARG BASE=python:${PYTHON_VERSION}-slim

FROM ${BASE} AS dependencies
ARG EXTRAS=router,vision
# Without a value pip's own default holds; a mirror is given with --build-arg.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python -m venv --without-pip /opt/keystage
# Dependencies first, with empty source folders: this layer is kept while only Keystage's sources change.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p controller/src/keystage keysmanager/src/keystage stage-function/src/keystage \
        loadgen/src/keystage benchmarks/src/keystage \
    && pip --python /opt/keystage/bin/python install --no-cache-dir --no-compile -c constraints.txt ".[${EXTRAS}]" \
    && pip --python /opt/keystage/bin/python uninstall -y keystage
# Compiled here, since nothing can be written at run time; unchecked, since nothing changes either. Modules named after
# a Python version (py312_...) are in that one's syntax: others cannot compile them, and never import them.
RUN python -m compileall -q -j 0 -x '/py3[0-9]+_[^/]*$' --invalidation-mode unchecked-hash /opt/keystage

FROM dependencies AS build
COPY controller/src controller/src
COPY keysmanager/src keysmanager/src
COPY stage-function/src stage-function/src
COPY loadgen/src loadgen/src
COPY benchmarks/src benchmarks/src
RUN pip wheel --no-cache-dir --no-deps -w /wheels . \
    && pip --python /opt/keystage/bin/python install --no-cache-dir --no-compile --no-deps --no-warn-script-location \
        --root /code /wheels/*.whl \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash -s /code -p / /code

FROM ${BASE}
RUN echo 'keystage:x:12000:' >> /etc/group \
    && echo 'keystage:x:12000:12000::/tmp:/usr/sbin/nologin' >> /etc/passwd
# Two layers: what changes rarely and is large, and Keystage itself.
COPY --from=dependencies /opt/keystage /opt/keystage
COPY --from=build /code/ /
# The root file system may be read-only; sockets are in KEYSTAGE_RUN, a few files in /tmp.
ENV PATH=/opt/keystage/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    KEYSTAGE_HTTP=0.0.0.0:8080 KEYSTAGE_RUN=/tmp
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Keystage router" \
      org.opencontainers.image.description="Routers of Keystage's pipelines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 12000:12000
EXPOSE 8080 7800
CMD ["keystage", "router"]
