"""What a failed call says: the gRPC code, and the ErrorDetail inside grpc-status-details-bin."""
import re
from dataclasses import dataclass
from typing import Optional

import grpc

from support.stubs import ROOT, pb

_GRPC_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def _read_status_map():
    """proto/status.h: X(NAME, number, "wire name", grpc code, "text")."""
    rows = re.findall(r'X\((\w+), (\d+), "(\w+)", (\d+), "', (ROOT / "proto" / "status.h").read_text())
    return {int(number): (wire, _GRPC_BY_NUMBER[int(code)]) for _, number, wire, code in rows}


STATUS_MAP = _read_status_map()
GRPC_CODE_OF = {wire: code for wire, code in STATUS_MAP.values()}


@dataclass(frozen=True)
class Refusal:
    """One failed call or refused step, whichever way it was told."""

    status: str  # name as in proto/status.h
    message: str
    op: Optional[int]
    array: str
    position: int
    value: int
    grpc_code: Optional[grpc.StatusCode]  # None: told in a message of a stream that goes on
    torn: tuple = ()


class RpcFailure(Exception):
    """A call that ended with an error; `refusal` is None when the transport, not the daemon, said no."""

    def __init__(self, code, text, refusal):
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.refusal = refusal

    @property
    def status(self):
        return self.refusal.status if self.refusal else None


class StepFailure(Exception):
    """A StepFailed event."""

    def __init__(self, refusal):
        super().__init__(f"{refusal.status}: {refusal.message}")
        self.refusal = refusal

    @property
    def status(self):
        return self.refusal.status

    @property
    def torn(self):
        """{pool id: tuple of blocks}"""
        return dict(self.refusal.torn)


def refusal_of(detail, grpc_code=None, torn=()):
    return Refusal(STATUS_MAP[detail.status][0], detail.message, detail.op if detail.about_op else None, detail.array,
                   detail.position, detail.value, grpc_code, torn)


def failure_of(error):
    """grpc.RpcError -> RpcFailure."""
    refusal = None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = pb.RpcStatus.FromString(value)
            assert status.code == error.code().value[0], "the status in the details is not the call's"
            assert len(status.details) == 1
            assert status.details[0].type_url == "type.googleapis.com/kvpool.v1.ErrorDetail"
            refusal = refusal_of(pb.ErrorDetail.FromString(status.details[0].value), error.code())
    return RpcFailure(error.code(), error.details(), refusal)
