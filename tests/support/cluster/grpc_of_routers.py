"""Sets gRPC up as routers do, when it is imported: before anything that imports gRPC."""

from common.nodes import Role
from protos.grpc_core import set_up_grpc

# Silent, as for a log in JSON: those that log for people are forked from here, too.
set_up_grpc(Role.ROUTER, "json")
