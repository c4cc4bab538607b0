"""`d3d-hf push`: uploads a drafter with its card and code to the Hub."""

import argparse
import sys

from .arguments import UsageError, one_line


def add_command(commands):
    parser = commands.add_parser(
        "push",
        help="upload a drafter to the Hub",
        description="Uploads a drafter's folder, with its card and with the code that loads it where this package is "
        "not installed. After an interruption the same command goes on: weights that have arrived are not sent again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="as save_pretrained wrote it, with the README.md of d3d-hf card"
    )
    parser.add_argument("repo_id", metavar="REPO", help="owner/name on the Hub; made if it does not exist")
    parser.add_argument("--dry-run", action="store_true", help="show what would go, and send nothing")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is made")
    parser.add_argument("--revision", metavar="BRANCH", help="commit to this branch, made if it does not exist (main)")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--message", default="Upload a D3D drafter", help="of the commit (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils import validate_repo_id

    from ..hub.publish import plan_upload, push

    try:
        validate_repo_id(args.repo_id)
    except HFValidationError as error:
        raise UsageError(f"REPO {args.repo_id!r} is no name of a repository: {one_line(error)}") from error
    if "/" not in args.repo_id:
        raise UsageError(f"REPO {args.repo_id!r} has no owner: give owner/name")
    try:
        upload = plan_upload(args.folder, args.repo_id)
    except (OSError, ValueError) as error:
        raise UsageError(f"FOLDER {args.folder!r} cannot be uploaded: {one_line(error)}") from error
    sizes = upload.sizes()
    if args.dry_run:
        for name, size in sorted(sizes.items()):
            print(f"{size:>14,}  {name}")
        for name in upload.left_out:
            print(f"{'stays here':>14}  {name}")
        print(f"{sum(sizes.values()):>14,}  bytes in {len(sizes)} files would go to {args.repo_id}")
        return 0
    try:
        commit = push(upload, args.repo_id, args.private, args.revision, args.create_pr, args.message)
    except OfflineModeIsEnabled as error:
        raise UsageError("the Hub is switched off by HF_HUB_OFFLINE: unset it to upload") from error
    except (OSError, ValueError, RuntimeError) as error:  # what the Hub answers is an OSError
        raise UsageError(f"the upload to {args.repo_id} failed: {one_line(error)}") from error
    print(f"{sum(sizes.values()):,} bytes in {len(sizes)} files", file=sys.stderr)
    print(commit.pr_url or commit.commit_url)
    return 0


__all__ = ["add_command", "run"]
