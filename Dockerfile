# taskqd in an image of its own. An application's image adds its modules and what they need:
#
#   FROM taskqd
#   USER root
#   RUN --mount=type=bind,source=dist,target=/dist pip install --no-cache-dir /dist/*.whl
#   USER 10001:10001
#
# It runs as a user without rights, writes to /run/taskqd and /tmp alone, and so takes a read-only root:
# docker run --read-only --tmpfs /run/taskqd:uid=10001,mode=0700 --tmpfs /tmp --stop-timeout 85 …

FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY taskqd taskqd
COPY migrations migrations
# An older pip writes a slower taskqd command, which probes run every few seconds.
RUN python -m venv /opt/app \
    && /opt/app/bin/pip install --no-cache-dir --upgrade pip \
    && /opt/app/bin/pip install --no-cache-dir .

FROM python:3.13-slim
COPY --from=build /opt/app /opt/app
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin taskqd \
    && install --directory --owner=10001 --group=10001 --mode=0700 /run/taskqd
ENV PATH=/opt/app/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /app
STOPSIGNAL SIGTERM
# Kubernetes has probes of its own and ignores this one.
HEALTHCHECK --interval=20s --timeout=5s --start-period=120s --retries=3 CMD ["taskqd", "health", "live"]
ENTRYPOINT ["taskqd"]
CMD ["run", "/etc/taskqd/workgroup.toml"]
