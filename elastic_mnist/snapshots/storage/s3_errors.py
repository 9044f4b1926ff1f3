"""What went wrong in S3: whether it may pass, and how to say it. Pure functions of an exception.

s3fs turns a server's answer into an `OSError` and keeps botocore's exception, with the answer, as its cause;
what came of no answer it passes on as it is.
"""

from http import HTTPStatus
from typing import Any, Final

from aiohttp import ClientPayloadError
from botocore import exceptions as botocore
from botocore.parsers import ResponseParserError

_BROKEN: Final = (
    botocore.ConnectionError,  # also of a timeout, of a name that does not resolve, and of a proxy
    botocore.HTTPClientError,
    botocore.IncompleteReadError,
    botocore.FlexibleChecksumError,
    ResponseParserError,  # overloaded gateways answer in HTML
    ClientPayloadError,
    ConnectionError,
    TimeoutError,
)
_PASSING: Final = {
    "ConditionalRequestConflict",  # another conditional write is under way, and will end one way or the other
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "TooManyRequests",
}
_CREDENTIALS: Final = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_REGION: Final = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}


def answer_of(error: BaseException) -> dict[str, Any]:
    """Return what the server answered with an error; empty where nothing came."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return answer if isinstance(answer, dict) else {}


def code_of(error: BaseException) -> str:
    """Return S3's name of an error, an HTTP status as text where the answer had no body, or nothing."""
    return str(answer_of(error).get("Error", {}).get("Code", ""))


def status_of(error: BaseException) -> int:
    """Return the HTTP status, 0 where no answer came."""
    return int(answer_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may do better a moment later."""
    status = status_of(error)
    if not status:
        return isinstance(error, _BROKEN) and not isinstance(error, botocore.SSLError)
    return (
        status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT)
        or (status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED)
        or code_of(error) in _PASSING
    )


def is_missing(error: BaseException) -> bool:
    """Whether the server says that there is no such object; a missing bucket or a web server's 404 is not that."""
    return code_of(error) == "NoSuchKey"


def is_conflict(error: BaseException) -> bool:
    """Whether a condition of a request was not met; one on an object that is gone is not met either."""
    return status_of(error) == HTTPStatus.PRECONDITION_FAILED or is_missing(error)


def explain(error: BaseException, endpoint: str) -> tuple[str, str]:
    """Return the cause of an error and the way out, for people."""
    answer, code, status = answer_of(error), code_of(error), status_of(error)
    reason = str(answer.get("Error", {}).get("Message") or error).rstrip(".") or type(error).__name__
    if status:
        reason = f"{endpoint} says {status} {'' if code == str(status) else code}: {reason}"
    elif is_transient(error) and endpoint not in reason:
        reason = f"{endpoint}: {reason}"
    return reason, _way_out(error, code, status)


def _way_out(error: BaseException, code: str, status: int) -> str:
    if code == "NoSuchBucket":
        return "make the bucket, or correct its name or AWS_ENDPOINT_URL"
    if code in _REGION or status in (HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.TEMPORARY_REDIRECT):
        answer = answer_of(error)
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
        return f"set AWS_DEFAULT_REGION to {region or 'the region of the bucket'}"
    if code in _CREDENTIALS or isinstance(error, (botocore.NoCredentialsError, botocore.PartialCredentialsError)):
        return "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "check the AWS credentials, and that they allow to list, read, write and delete"
    if is_transient(error) or status == HTTPStatus.NOT_FOUND:
        return "check AWS_ENDPOINT_URL and the network, or try again later"
    return "make it accessible or choose another"
