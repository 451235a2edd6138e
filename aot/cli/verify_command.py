"""``fp8-aot verify``"""

from __future__ import annotations

from pathlib import Path

import click

from fp8_aot.aot.cli.common import json_option, print_json


@click.command("verify")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@json_option
def command(bundles: tuple[Path, ...], as_json: bool) -> int:
    """Check bundles: integrity, targets, and parameter lists proven against the objects."""
    from fp8_aot.aot.errors import WorkError
    from fp8_aot.aot.verify import verify
    from fp8_aot.loader.errors import BundleError

    results = []
    for path in bundles:
        try:
            bundle, problems = verify(path)
            facts = {
                "variants": len(bundle.manifest.variants),
                "objects": len(bundle.objects),
                "bytes": len(bundle.data),
            }
        except (WorkError, BundleError) as error:
            facts, problems = {}, [str(error)]
        results.append({"bundle": str(path), "ok": not problems, **facts, "problems": problems})
        if not as_json:
            for problem in problems:
                click.echo(f"{path}: {problem.removeprefix(f'{path}: ')}", err=True)
            if not problems:
                click.echo(
                    f"{path}: good: {facts['variants']} variants, {facts['objects']} objects, {facts['bytes']:,} bytes"
                )
    if as_json:
        print_json(results)
    return 0 if all(result["ok"] for result in results) else 1
