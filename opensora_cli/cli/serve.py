"""`osora serve`: an API, a queue and a page for videos."""

from opensora_cli.cli.command import SET, Call, make_command
from opensora_cli.core.exceptions import missing_library
from opensora_cli.settings.flags import Option
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, collect_overrides
from opensora_cli.settings.tools import ServeSettings


def serve(settings: ServeSettings, call: Call) -> None:
    """Serve a page and an API that make videos, with a queue that survives restarts.

    The page is at http://127.0.0.1:8000, the API at /v1, its description at /openapi.json.

    Examples:
      osora serve
      osora serve --model open-sora-v2 --set memory.offload=blocks --folder videos
      osora serve --host 0.0.0.0 --token-file token.txt --groups 8
      osora serve --gpus 8
    """
    given = {"parallel.gpus": Given(call.given["--gpus"], "--gpus")} if "--gpus" in call.given else {}
    base = collect_overrides(GenerateSettings, given, call.assignments)
    if call.context is not None:
        from opensora_cli.server.worker import make_in_rank

        make_in_rank(call.context, base)
        return
    try:
        from opensora_cli.server.run import serve as run
    except ImportError as error:
        raise missing_library(f"osora serve needs {error.name}", extra="serve") from error
    run(settings, base, reporter=call.reporter)


_ROWS = {
    "--model": Option("model", metavar="NAME"),
    "--host": Option("host", metavar="ADDRESS"),
    "--folder": Option("folder", metavar="FOLDER"),
    "--token-file": Option("token_file", metavar="FILE"),
    "--save-every": Option("save_every", metavar="SECONDS"),
    "--gpus": Option(help="GPUs that share each video.", metavar="N", default="1"),
    "--set": SET._replace(help="Any setting of all videos, such as memory.offload=blocks."),
}
COMMAND = make_command(serve, _ROWS, on_ranks=True)
