"""What a person is told when a command cannot go on: one sentence, one exit code, no traceback."""

EXIT_FAILED = 1
EXIT_USAGE = 2


class CommandProblem(Exception):
    """The sentence says what is wrong and what to do. Raised anywhere below a command, told by `cli.main` alone."""

    def __init__(self, sentence: str, *, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit_code = exit_code
