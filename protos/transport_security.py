"""gRPC between processes: mutual TLS with the keys of the cluster, or in clear without keys.

Certificates name kinds of processes and no machines, so a node may move. A certificate of the
cluster's CA is not enough: a node accepts routers only, and a router connects to nodes only, so
that one node's certificate gives no access to the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
import grpc.aio

from common.files.keys_folder import NODE_NAME, ROUTER_NAME, Keys, TlsFiles

Options = Sequence[tuple[str, Any]]


def open_channel(address: str, options: Options, keys: Keys | None) -> grpc.aio.Channel:
    """Return a router's channel to a node; with keys, the peer must have a node's certificate.

    It connects by itself with the first call. It keeps the router's certificate with which it was
    opened: after a renewal another channel has to be opened.
    """
    if keys is None:
        return grpc.aio.insecure_channel(address, options=list(options))
    tls = keys.tls
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca,
        private_key=tls.private_key,
        certificate_chain=tls.certificate,
    )
    named = [*options, ("grpc.ssl_target_name_override", NODE_NAME)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def tls_hint(details: str, keys: Keys | None) -> str:
    """Return what of the keys may keep a router from a node, for gRPC's text of a connection that
    failed; '' where it is nothing of them.

    A node that refuses a certificate ends the connection, which is all that the router sees of it.
    """
    if keys is None:
        return _NODE_HAS_KEYS if _ENDED in details else ""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return _ROUTER_REFUSES
    if "Hostname Verification Check failed" in details:
        return _IS_NO_NODE
    if "WRONG_VERSION_NUMBER" in details:
        return _NODE_HAS_NONE
    return _NODE_REFUSES if _ENDED in details else ""


_ENDED = "Socket closed"
_NODE_HAS_KEYS = " (the node may have --keys, and this router has none)"
_NODE_HAS_NONE = " (the node has no --keys, and this router has some)"
_IS_NO_NODE = " (what listens there shows a certificate of the cluster that is not a node's)"
_ROUTER_REFUSES = (
    " (this router refuses the node's certificate: it is of other keys, or its dates or this "
    "machine's clock are wrong)"
)
_NODE_REFUSES = (
    " (the node may refuse this router's certificate: it is of other keys, or its dates or the "
    "clock of the node's machine are wrong)"
)


def make_server(options: Options, keys: Keys | None) -> grpc.aio.Server:
    """Return a node's server; with keys it answers routers only."""
    interceptors = [] if keys is None else [OnlyRouters()]
    return grpc.aio.server(interceptors=interceptors, options=list(options))


def add_port(server: grpc.aio.Server, address: str, keys: Keys | None) -> int:
    """Listen; return the port. Raises `RuntimeError` when the address cannot be bound.

    Each handshake uses the latest certificate of `keys`. It waits for the interpreter lock on one
    of gRPC's threads: where a process has no other one left, a ping is answered late. Certificates
    that gRPC holds itself would need another server on the port at each renewal.
    """
    if keys is None:
        return server.add_insecure_port(address)
    served = keys.tls

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if they are others than at the last handshake."""
        nonlocal served
        if keys.tls is served:
            return None
        served = keys.tls
        return _server_certificates(served)

    credentials = grpc.dynamic_ssl_server_credentials(
        _server_certificates(served),
        # None means that nothing has changed, which the stubs do not know.
        cast(Any, changed),
        require_client_authentication=True,
    )
    return server.add_secure_port(address, credentials)


def _server_certificates(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(tls.private_key, tls.certificate)], root_certificates=tls.ca
    )


class OnlyRouters(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls over connections whose certificate is not a router's."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler with a check before it; None for an unknown method.

        Raises `TypeError` for a kind of call without a check.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_guarded(handler.unary_unary), **codecs)
        if handler.stream_stream is not None:
            guarded = _guarded_stream(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(guarded, **codecs)
        raise TypeError(f"{handler_call_details} is a kind of call without a check")


def _guarded(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        await _require_router(context)
        return await call(request, context)

    return guarded


def _guarded_stream(call: Callable[..., Any]) -> Callable[..., Any]:
    async def guarded(request: Any, context: Any) -> Any:
        await _require_router(context)
        async with aclosing(call(request, context)) as messages:
            async for message in messages:
                yield message

    return guarded


async def _require_router(context: Any) -> None:
    names = context.auth_context().get("x509_subject_alternative_name", ())
    if ROUTER_NAME.encode() not in names:
        shown = b", ".join(names).decode(errors="replace") or "nobody"
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"the certificate is {shown}'s: only a router's may call a node",
        )
