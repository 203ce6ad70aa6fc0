"""The commands that publish images or read them: push, verify, sbom, diff."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from images import ImagesError

if TYPE_CHECKING:
    from images.cli.session import Session
    from images.engine.docker import DockerEngine
    from images.make.plan import PlannedImage
    from images.ship.diff import Contents
    from images.ship.push import Pushed
    from images.ship.registry import Login, Registry, RegistryPath


# Compare a signed statement with the requested reference: its role, and its tag if a build made that. A valid signature
# is not enough: anyone with push access may move a name to another signed image, an older one or another role's.

# A tag that a build made, RELEASE-VARIANT[-ARCH]-HASH, names one image for ever. A site may move any other tag.
BUILT = re.compile(r"[0-9][0-9A-Za-z._]*-[a-z]+(?:-(?:amd64|arm64))?-[0-9a-f]{12}")


def check_statement_name(reference: str, role: str, tag: str, statements: Mapping[str, Mapping[str, Any]]) -> None:
    """Check each architecture's statement, by its name in the index; a single image has an empty name."""
    what = f"verify {reference}"
    for statement in statements.values():
        built_role = statement["predicate"]["buildDefinition"]["externalParameters"]["role"]
        if built_role != role:
            raise ImagesError(what, f"it was built as {built_role}, and {role} was asked for",
                              hint=f"is {role} a name that you gave it? then say --role {built_role}")  # fmt: skip
    if not BUILT.fullmatch(tag):
        return
    from images.ship.push import make_tag as index_tag

    names = {arch: read_built_as(what, statement) for arch, statement in statements.items()}
    expected = names[""][0] if "" in names else index_tag(names)
    if tag != expected:
        raise ImagesError(what, f"this tag belongs to another build: what it leads to was built as {expected}",
                          hint="the tag was moved: ask who may push there; take an image by its digest")  # fmt: skip


def read_built_as(what: str, statement: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tag and the whole hash that a statement names."""
    inside = statement["predicate"]["buildDefinition"].get("internalParameters")
    if not isinstance(inside, dict) or not all(isinstance(inside.get(name), str) for name in ("tag", "inputs")):
        raise ImagesError(what, "its statement does not say under which tag it was built")
    return inside["tag"], inside["inputs"]


AS_JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")


def open_session(ctx: click.Context) -> Session:
    from images import settings
    from images.cli.session import Session

    return Session.open(ctx.obj.repository, settings.read(assignments=ctx.obj.assignments))


def open_sessions(ctx: click.Context) -> list[Session]:
    """Open one session for each requested architecture."""
    from images import settings
    from images.cli.session import Session

    return Session.open_each(ctx.obj.repository, settings.read(assignments=ctx.obj.assignments))


def require_built(session: Session, roles: Sequence[str]) -> list[PlannedImage]:
    """Return the roles' images as they would be built now; raise if the engine lacks one."""
    names = session.select_targets(roles)
    composed, present = session.compose(names), session.list_present()
    images = [composed.role(name) for name in names]
    for image in images:
        if image.reference not in present:
            raise ImagesError(f"use {image.reference}", "it is not built", hint=f"`build.py build {image.name}`")
    return images


@click.command()
@click.argument("roles", nargs=-1)
@click.option("--registry", required=True, metavar="HOST[:PORT][/PATH]", help="Where to.")
@click.option("--user", default="", help="Log in as; with --password-stdin.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
@click.option("--retries", type=int, default=None, help="How often the engine may try a failed upload again.")
@click.option("--sign", "key", type=click.Path(path_type=Path), help="Attach the provenance, signed by this ssh key.")
@AS_JSON
@click.pass_context
def push(
    ctx: click.Context, roles: Sequence[str], registry: str, user: str, password_stdin: bool, retries: int | None,
    key: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Push the roles' images, then read every byte back by digest."""
    from images.make import progress
    from images.ship.registry import RegistryPath

    place = RegistryPath.parse(registry)
    login = login_to(place, user, password_stdin)
    pushed = push_roles(open_sessions(ctx), roles, place, login, key=key, retries=retries)
    if as_json:
        progress.print_json([{"image": p.reference, "tag": p.tag, "digest": p.digest, "sent": p.sent,
                              "present": p.present, "size": p.size} for _, p in pushed])  # fmt: skip
        return
    rows = [
        (p.reference, p.tag, progress.format_megabytes(p.size), f"{p.sent} sent, {p.present} there") for _, p in pushed
    ]
    progress.print_table(("by digest", "tag", "compressed", "layers"), rows)


def login_to(place: RegistryPath, user: str, password_stdin: bool) -> Login | None:
    from images.ship import registry

    password = sys.stdin.readline().rstrip("\n") if password_stdin else ""
    return registry.find_login(place.host, os.environ, user=user, password=password)


def push_roles(
    sessions: Sequence[Session], roles: Sequence[str], place: RegistryPath, login: Login | None, *,
    key: Path | None = None, retries: int | None = None,
) -> list[tuple[str, Pushed]]:  # fmt: skip
    """Push the roles' images; return each role with its image, and after them its index of several architectures."""
    from images.ship.push import ENGINES_OWN_RETRIES
    from images.ship.push import push as push_image
    from images.ship.registry import Blob, Registry

    seen: set[Blob] = set()
    pushed = []
    by_role: dict[str, dict[str, Pushed]] = {}
    manifests: dict[str, dict[str, tuple[str, str]]] = {}
    # Report everything that is missing before sending anything.
    todo = [(session, image) for session in sessions for image in require_built(session, roles)]
    for session, image in todo:
        click.echo(f"pushing {image.reference}", err=True)
        pushed_image = push_image(session.engine, image.reference, place, image.name, image.tag, login, seen=seen,
                         retries=ENGINES_OWN_RETRIES if retries is None else retries)  # fmt: skip
        pushed.append((image.name, pushed_image))
        if key:
            attach_provenance(session, image, Registry(place, image.name, login), pushed_image.digest, key)
        by_role.setdefault(image.name, {})[session.place.choice.arch] = pushed_image
        manifests.setdefault(image.name, {})[session.place.choice.arch] = (image.tag, image.hash)
    for name, images in by_role.items():
        if len(images) > 1:
            pushed.append((name, push_index(Registry(place, name, login), manifests[name], images)))
    return pushed


def push_index(registry: Registry, made: Mapping[str, tuple[str, str]], images: Mapping[str, Pushed]) -> Pushed:
    """Push the index: the one name of a role's images for several architectures."""
    from images.ship import provenance, push
    from images.ship.push import Pushed

    tag = push.make_tag(made)
    digest = push.put_index(
        registry, tag, {arch: provenance.read_subject(registry, p.digest) for arch, p in images.items()}
    )
    where = f"{registry.place.host}/{registry.repository}"
    return Pushed(f"{where}@{digest}", f"{where}:{tag}", digest, 0, len(images), sum(p.size for p in images.values()))


def attach_provenance(session: Session, image: PlannedImage, registry: Registry, digest: str, key: Path) -> None:
    from images.make.build import git_revision
    from images.ship import provenance

    choice = session.place.choice
    slurm = f"{choice.slurm.value} {choice.release}".rstrip()
    parameters = {
        "role": image.name,
        "variant": choice.variant,
        "slurm": slurm,
        "cuda": choice.cuda,
        "arch": choice.arch,
    }
    went_in = dict(image.inputs) | {p.wanted: p.sha256 for slice_ in image.slices for p in slice_.packages}
    went_in |= {wheel.wanted: wheel.sha256 for wheel in image.wheels}
    build = provenance.Build(parameters, image.hash, image.tag, went_in, git_revision(session.repository))
    provenance.attach_build(registry, build, digest, key)


@click.command()
@click.argument("reference", metavar="HOST/PATH/NAME[:TAG|@DIGEST]")
@click.option(
    "--signers", type=click.Path(path_type=Path), required=True, help="File of allowed signers, in ssh's format."
)
@click.option("--role", default="", metavar="ROLE", help="Built as; without it the last part of NAME.")
@click.option("--user", default="", help="Log in as; with --password-stdin.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
@AS_JSON
def verify(reference: str, signers: Path, role: str, user: str, password_stdin: bool, as_json: bool) -> None:
    """Verify that an image in a registry was built by an allowed signer: its provenance and signature."""
    from images.make import progress
    from images.ship import provenance, push
    from images.ship.registry import Registry, RegistryPath

    path, at, digest = reference.partition("@")
    tag = digest
    if not at:
        head, _, last = path.rpartition("/")
        last, _, tag = last.partition(":")
        path, tag = f"{head}/{last}", tag or "latest"
    place = RegistryPath.parse(path.rpartition("/")[0])
    registry = Registry(place, path.rpartition("/")[2], login_to(place, user, password_stdin))
    whole = provenance.read_subject(registry, tag)
    rows, data, statements = [], [], {}
    for arch, image in push.list_images(registry, whole).items():
        envelopes = provenance.read_attached(registry, image, provenance.TYPE)
        statement = provenance.verify(envelopes, image["digest"], signers, f"{reference} {arch}".rstrip())
        parameters = statement.statement["predicate"]["buildDefinition"]["externalParameters"]
        if arch and parameters.get("arch", arch) != arch:
            raise ImagesError(f"verify {reference}", f"what is named for {arch} was built for {parameters['arch']}")
        statements[arch] = statement.statement
        shown = ", ".join(f"{name} {value}" for name, value in sorted(parameters.items()))
        rows.append((f"{path}@{image['digest']}", statement.signer, shown))
        data.append({"image": rows[-1][0], "signer": statement.signer, "statement": statement.statement})
    check_statement_name(reference, role or path.rpartition("/")[2], tag, statements)
    if as_json:
        progress.print_json(
            data[0]
            if whole["mediaType"] != provenance.INDEX
            else {"image": f"{path}@{whole['digest']}", "images": data}
        )
        return
    progress.print_table(("image", "signed by", "built as"), rows)


@click.command()
@click.argument("role")
@click.pass_context
def sbom(ctx: click.Context, role: str) -> None:
    """Print a role's SPDX document from its image."""
    session = open_session(ctx)
    (image,) = require_built(session, [role])
    with session.engine.container(image.reference) as container:
        tar = session.engine.read_path(container, "/usr/share/minivm/sbom.spdx.json")
    with tar:
        data = tar.extractfile(tar.next() or "")
        assert data is not None
        sys.stdout.buffer.write(data.read())


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--all", "everything", is_flag=True, help="Every file, not only the heaviest.")
@AS_JSON
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, everything: bool, as_json: bool) -> None:
    """Show what differs between two images: packages, files, size by layer. A and B are roles or image names."""
    from images.make import progress
    from images.ship import diff as difference

    session = open_session(ctx)
    prefix, roles = session.settings.prefix, session.definition.roles
    names = [session.latest_name(f"{prefix}/{name}") if name in roles else name for name in (a, b)]
    compared = difference.compare(*(read_contents(session.engine, name) for name in names))
    if as_json:
        progress.print_json(difference.as_data(compared))
        return
    for line in difference.format_report(compared, sys.maxsize if everything else 20):
        click.echo(line)


def read_contents(engine: DockerEngine, name: str) -> Contents:
    from images.engine.store import Chunks
    from images.ship.diff import read

    if not engine.has(name):
        raise ImagesError(f"read image {name}", "the engine does not have it", hint="`build.py build` makes a role's")
    return read(Chunks(engine.save(name)), name)
