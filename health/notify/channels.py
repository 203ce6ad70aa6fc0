"""Send one message by SMTP or HTTP, within a deadline, over verified TLS. What the server answers is not trusted."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import smtplib
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from ground.errors import one_line
from health.notify.settings import MailSettings, WebhookSettings

WAIT = 10.0  # for one answer
DEADLINE = 40.0  # for all of a message: a server that sends a byte a second is late, too
LAST_WAIT = 60.0  # for the answer to a whole mail, which the relay may check first
LEAVE_WAIT = 2.0  # for the answer to QUIT, which changes nothing
SHOWN = 200
MOST_REPLY = 64 * 1024  # of a relay, all lines together
MOST_READ = 8192  # of an answer, so that a cut leaves no part of a secret in what is shown
REFUSES_MESSAGE = (400, 413, 415, 422)
MOST_RETRY_AFTER = 3600.0


class MessageRefusedError(Exception):
    """The server refuses this message for good; other messages may go."""


class MessageDeferredError(Exception):
    """The server takes this message later; other messages may go now."""


class MessageUnansweredError(MessageDeferredError):
    """The relay got all of this message and gave no answer: it may have taken it."""


class ChannelDownError(Exception):
    """No message goes this way now. `after` is when the server wants the next try, in seconds.

    `kind` is for pages that every user may read: it quotes nothing that the server said.
    """

    def __init__(self, why: str, kind: str = "not reached", after: float = 0.0) -> None:
        super().__init__(why)
        self.kind, self.after = kind, after


def send_mail(settings: MailSettings, ca: str, to: tuple[str, ...], data: bytes) -> str:
    """Send an email; return the relay's answer."""
    with ExitStack() as stack:
        try:
            with _deadline(DEADLINE):
                client = _connect(settings, ca)
                stack.callback(_leave, client)
                _hand_over(client, settings.sender, to, data)
        except smtplib.SMTPAuthenticationError as error:
            reason = f"the relay refuses the user or the password: {_answer(error.smtp_code, error.smtp_error)}"
            raise ChannelDownError(_mask(reason, settings.password), _kind(error)) from None
        except smtplib.SMTPNotSupportedError as error:
            raise ChannelDownError(
                _mask(f"the relay lacks what the settings want: {error}"), "no TLS or login"
            ) from None
        except (OSError, ValueError, smtplib.SMTPException) as error:
            raise ChannelDownError(_mask(_why(error), settings.password), _kind(error)) from None
        try:
            with _deadline(LAST_WAIT):
                code, answer = client.getreply()
        except (OSError, ValueError, smtplib.SMTPException) as error:
            raise MessageUnansweredError(_mask(_why(error), settings.password)) from None
    if code != 250:
        _refuse(code, answer)
    return _answer(code, answer)


class _BoundedReplies:
    """The relay's side of a connection: a reply of many lines ends as soon as it is too long."""

    def __init__(self, file: Any) -> None:
        self.file, self.left = file, MOST_REPLY

    def readline(self, size: int) -> bytes:
        line: bytes = self.file.readline(size)
        self.left -= len(line)
        if self.left < 0:
            raise OSError(f"its reply is longer than {MOST_REPLY >> 10} KiB")
        return line

    def close(self) -> None:
        self.file.close()


class _Bounded(smtplib.SMTP):
    """smtplib keeps each line of a reply, however many there are."""

    def getreply(self) -> tuple[int, bytes]:
        if self.file is None and self.sock is not None:
            self.file = _BoundedReplies(self.sock.makefile("rb"))
        if self.file is not None:
            self.file.left = MOST_REPLY
        return super().getreply()


class _BoundedTls(_Bounded, smtplib.SMTP_SSL):
    pass


def _leave(client: smtplib.SMTP) -> None:
    """Say goodbye. No answer to that changes what became of the message."""
    with suppress(OSError, ValueError, smtplib.SMTPException), _deadline(LEAVE_WAIT):
        client.quit()
    client.close()


def _connect(settings: MailSettings, ca: str) -> smtplib.SMTP:
    name = os.environ.get("MINIVM_POD_NAME") or "localhost"  # smtplib would ask the DNS for one
    if settings.mode == "smtps":
        client: smtplib.SMTP = _BoundedTls(
            settings.host, settings.port, local_hostname=name, timeout=WAIT, context=tls(ca)
        )
    else:
        client = _Bounded(settings.host, settings.port, local_hostname=name, timeout=WAIT)
    try:
        if settings.mode == "starttls":
            client.starttls(context=tls(ca))
        if settings.user:
            client.login(settings.user, settings.password)
    except BaseException:
        client.close()
        raise
    return client


def _hand_over(client: smtplib.SMTP, sender: str, to: tuple[str, ...], data: bytes) -> None:
    """Send the envelope and the whole mail. The relay's answer to the mail is still to be read."""
    client.ehlo_or_helo_if_needed()
    code, answer = client.mail(sender)
    if code != 250:
        raise ChannelDownError(f"the relay refuses the sender {sender}: {_answer(code, answer)}", f"SMTP {code}")
    answers = [client.rcpt(address) for address in to]
    if not any(code in (250, 251) for code, _ in answers):
        code, answer = answers[0]
        _refuse(code, answer)
    code, answer = client.docmd("DATA")
    if code != 354:
        _refuse(code, answer)
    if client.sock is not None:
        client.sock.settimeout(LAST_WAIT)
    client.send(re.sub(rb"(?m)^\.", b"..", data) + b".\r\n")


def _refuse(code: int, reply: bytes | str) -> NoReturn:
    if code == 421:
        raise ChannelDownError(f"the relay ends the connection: {_answer(code, reply)}", f"SMTP {code}")
    raise (MessageRefusedError if code >= 500 else MessageDeferredError)(_answer(code, reply))


def send_webhook(settings: WebhookSettings, ca: str, body: Mapping[str, Any], within: float = DEADLINE) -> str:
    """Post a message; return the server's answer. A redirect is not followed."""
    parts = urlsplit(settings.url)
    headers = {"Content-Type": "application/json", "User-Agent": "minivm"}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    host = parts.hostname or ""
    values = [part.partition("=")[2] for part in parts.query.split("&")]
    secrets = (parts.path, parts.query, parts.password or "", *parts.path.split("/"), *values)
    try:
        with _deadline(within):
            if parts.scheme == "https":
                way: http.client.HTTPConnection = http.client.HTTPSConnection(
                    host, parts.port, timeout=WAIT, context=tls(ca)
                )
            else:
                way = http.client.HTTPConnection(host, parts.port, timeout=WAIT)
            try:
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                way.request("POST", path, json.dumps(body).encode(), headers)
                answer = way.getresponse()
                status_line = f"HTTP {answer.status} {answer.reason}"
                text = answer.read(MOST_READ).decode(errors="replace")
            finally:
                way.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ChannelDownError(_mask(_why(error), *secrets), _kind(error)) from None
    shown = _mask(f"{status_line} {text}".strip(), *secrets)
    if 200 <= answer.status < 300:
        return shown
    if answer.status in REFUSES_MESSAGE:
        raise MessageRefusedError(shown)
    after = _retry_after(answer.headers.get("Retry-After", ""))
    raise ChannelDownError(f"the webhook answers {shown}", f"HTTP {answer.status}", after)


def tls(ca: str) -> ssl.SSLContext:
    """Return a context that checks the certificate and the name, by the public authorities and the site's own."""
    context = ssl.create_default_context()
    if ca:
        try:
            context.load_verify_locations(cadata=ca)
        except ssl.SSLError as error:
            raise ValueError(f"notifications.ca is no certificate in PEM: {error}") from None
    return context


@contextmanager
def _deadline(within: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `within` seconds."""

    def raise_timeout(_: int, __: object) -> NoReturn:
        raise TimeoutError(f"not done within {within:g} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, within)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    late = error if isinstance(error, TimeoutError) else error.__context__  # smtplib makes another error of it
    if isinstance(late, TimeoutError):
        return f"no answer: {late}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _kind(error: Exception) -> str:
    if isinstance(error, smtplib.SMTPResponseException):
        return f"SMTP {error.smtp_code}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is refused"
    if isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError):
        return "no answer"
    if isinstance(error, ValueError):
        return "wrong settings"
    return (isinstance(error, OSError) and error.strerror) or "not reached"


def _answer(code: int, reply: bytes | str) -> str:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else reply
    return f"{code} {one_line(text)}"[:SHOWN]


def _mask(text: str, *secrets: str) -> str:
    """Return text for logs without the secrets, which are longest first so that none is left in part."""
    for secret in sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True):
        if len(secret) > 3:
            text = text.replace(secret, "***")
    return one_line(text)[:SHOWN]


def _retry_after(text: str) -> float:
    return min(MOST_RETRY_AFTER, float(text)) if text.isascii() and text.isdigit() and len(text) < 8 else 0.0
