"""What the application of the benchmarks imports, under taskqd and under each peer: as much as many services do."""

import boto3  # noqa: F401
import httpx  # noqa: F401
import numpy  # noqa: F401 - as np elsewhere
import sqlalchemy.dialects.postgresql
import sqlalchemy.orm  # noqa: F401
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: F401
