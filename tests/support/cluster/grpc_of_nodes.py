"""Sets gRPC up as nodes do, when it is imported: before anything that imports gRPC."""

from common.nodes import Role
from protos.grpc_core import set_up_grpc

set_up_grpc(Role.MIXED, "text")
