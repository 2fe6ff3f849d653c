"""Programs in one process: joins and forks, errors of one request and of a batch, cancellation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from support.stream_programs import Adding, parse, render, simple

from keystage.streams.api import Merge, Message, NetModule, Program, ProgramError, Stream, StreamModule
from keystage.streams.graph_checks import GraphError
from keystage.streams.local import run_local
from keystage.streams.merging import merge_messages
from keystage.streams.runtime import LocalRuntime

IN, OUT, S, T, U = Stream("in"), Stream("out"), Stream("s"), Stream("t"), Stream("u")


class _Each(StreamModule):
    """Applies a function to every message."""

    def __init__(
        self, inputs: Sequence[Stream], outputs: Sequence[Stream], each: Callable[[Message], Message]
    ) -> None:
        super().__init__(inputs, outputs)
        self.each = each

    def compute(self, messages: list[Message]) -> list[Message]:
        return [self.each(message) for message in messages]


class _Fork(_Each):
    """Sends to all outputs, or where the header says."""

    def scatter(self, message: Message) -> Sequence[str]:
        names: list[str] = message.header.get("to") or [stream.name for stream in self.outputs]
        return names


class _Join(StreamModule):
    def __init__(
        self, inputs: Sequence[Stream], outputs: Sequence[Stream], merge: Merge, axis: int = 0
    ) -> None:
        super().__init__(inputs, outputs, join="all", merge=merge, merge_axis=axis)

    def compute(self, messages: list[Message]) -> list[Message]:
        return messages


def _same(message: Message) -> Message:
    return message


def _diamond(
    merge: Merge, left: Callable[[Message], Message], right: Callable[[Message], Message]
) -> Program:
    def show(message: Message) -> tuple[bytes, str]:
        return str({name: tensor.tolist() for name, tensor in message.data.items()}).encode(), "text/plain"

    def vector(body: bytes, content_type: str) -> Message:
        del content_type
        return Message({}, {"x": torch.tensor([float(body), 1.0])})

    modules: dict[str, StreamModule] = {
        "fork": _Fork([IN], [S, T], _same),
        "left": _Each([S], [Stream("l")], left),
        "right": _Each([T], [Stream("r")], right),
        "join": _Join([Stream("l"), Stream("r")], [OUT], merge),
    }
    return Program("diamond", modules, IN, OUT, vector, show)


def _times(factor: float) -> Callable[[Message], Message]:
    return lambda message: message.next({"x": message.data["x"] * factor})


@pytest.mark.parametrize(
    ("merge", "found"), [("sum", [5.0, 5.0]), ("max", [3.0, 3.0]), ("concat", [2.0, 2.0, 3.0, 3.0])]
)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_join_merges_the_parts_of_a_request(merge: Merge, found: list[float], seed: int | None) -> None:
    answers = run_local(_diamond(merge, _times(2), _times(3)), [b"1"] * 3, seed=seed, is_strict=True).answers
    assert [answer.body.decode() for answer in answers] == [str({"x": found})] * 3


def test_tensors_that_only_one_branch_has_are_kept() -> None:
    program = _diamond("sum", _times(2), lambda message: message.next({"y": message.data["x"]}, side="r"))
    assert run_local(program, [b"1"]).answers[0].body.decode() == str({"x": [2.0, 2.0], "y": [1.0, 1.0]})


def test_parts_that_do_not_fit_end_the_request_by_the_tensors_name() -> None:
    program = _diamond("sum", _times(1), lambda message: message.next({"x": torch.zeros(3)}))
    answer = run_local(program, [b"1"]).answers[0]
    assert answer.refusal == "sum of tensors 'x' of shapes (2,), (3,)"
    assert answer.http_status == 500


def test_what_cannot_be_merged_says_why() -> None:
    def part(request: int, *shape: int) -> Message:
        return Message({"request": request}, {"x": torch.zeros(shape)})

    with pytest.raises(ProgramError, match=r"a join of messages of different requests: \[1, 2\]"):
        merge_messages([part(1, 2), part(2, 2)], "sum")
    with pytest.raises(ProgramError, match="concat of tensors 'x': "):
        merge_messages([part(1, 2, 3), part(1, 2, 4)], "concat", 0)
    assert merge_messages([part(1, 2, 3), part(1, 2, 4)], "concat", 1).data["x"].shape == (2, 7)


def test_a_lost_branch_is_a_refusal_of_that_request_alone() -> None:
    def lose(message: Message) -> Message:
        return message.next(message.data, to=["s"] if float(message.data["x"][0]) == 1 else ["s", "t"])

    program = _diamond("sum", _times(1), _times(1))
    fork = program.modules["fork"]
    assert isinstance(fork, _Fork)
    fork.each = lose
    first, second = run_local(program, [b"1", b"2"]).answers
    assert "a branch was lost: module join waits for a message of stream r" in first.refusal
    assert second.refusal == ""


def test_an_unknown_stream_ends_that_request_alone() -> None:
    def stray(message: Message) -> Message:
        return message.next(message.data, to=["nowhere"] if message.header["x0"] == 1 else [])

    program = simple({"a": _Fork([IN], [OUT], stray)})
    answers = run_local(program, [b"1", b"2"]).answers
    assert answers[0].refusal == "module a scattered to stream 'nowhere', it has out"
    assert answers[1].body == b"2"


def test_what_scatter_raises_ends_that_request_alone() -> None:
    class Fussy(_Each):
        def scatter(self, message: Message) -> str:
            return {2: "out"}[message.header["x0"]]

    answers = run_local(simple({"a": Fussy([IN], [OUT], _same)}), [b"1", b"2"]).answers
    assert answers[0].refusal == "module a, scatter: KeyError(1)"
    assert answers[1].body == b"2"


def test_an_exception_ends_the_whole_batch_by_the_modules_name_and_is_raised_when_strict() -> None:
    def fail(message: Message) -> Message:
        if message.header["x0"] == 1:
            raise ZeroDivisionError("x0 is 1")
        return message

    def program() -> Program:
        return simple({"a": _Each([IN], [OUT], fail)})

    answers = run_local(program(), [b"1", b"2"]).answers
    assert [answer.refusal for answer in answers] == ["module a: ZeroDivisionError: x0 is 1"] * 2
    answers = run_local(program(), [b"1", b"2"], batch=1).answers
    assert [bool(answer.refusal) for answer in answers] == [True, False]
    with pytest.raises(ZeroDivisionError):
        run_local(program(), [b"1"], is_strict=True)


def test_a_module_may_refuse_a_request() -> None:
    def judge(message: Message) -> Message:
        return message.refused("too odd", 418) if message.header["x0"] % 2 else message

    answers = run_local(simple({"a": _Each([IN], [OUT], judge)}), [b"1", b"2"]).answers
    assert (answers[0].refusal, answers[0].http_status) == ("too odd", 418)
    assert answers[1].body == b"2"


class _Rude(StreamModule):
    def __init__(self, give: Callable[[list[Message]], list[Message]]) -> None:
        super().__init__([IN], [OUT])
        self.give = give

    def compute(self, messages: list[Message]) -> list[Message]:
        return self.give(messages)


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda messages: messages[:-1], "module a: compute gave 1 messages for 2"),
        (lambda messages: messages[::-1], r"changed requests or their order: \[1, 0\], not \[0, 1\]"),
        (lambda messages: [Message({}) for _ in messages], "a message without its request"),
        (
            lambda messages: [m.next(m.data, bad=torch.zeros(1)) for m in messages],
            "header field 'bad' is Tensor; int, float, str, bool and lists of them travel",
        ),
    ],
)
def test_a_module_that_breaks_its_contract_is_told_so(
    give: Callable[[list[Message]], list[Message]], words: str
) -> None:
    answers = run_local(simple({"a": _Rude(give)}), [b"1", b"2"]).answers
    assert [re.search(words, answer.refusal) is not None for answer in answers] == [True, True]


def test_bodies_that_cannot_be_parsed_are_refused() -> None:
    def picky(body: bytes, content_type: str) -> Message:
        if body == b"0":
            raise ProgramError("x must not be 0", 422)
        return parse(body, content_type)

    program = Program("picky", {"a": Adding(1, [IN], [OUT])}, IN, OUT, picky, render)
    answers = run_local(program, [b"0", b"no", b"1"]).answers
    assert (answers[0].refusal, answers[0].http_status) == ("x must not be 0", 422)
    assert answers[1].refusal.startswith("parse: DecodeError")
    assert (answers[1].http_status, answers[2].body) == (400, b"32")


def test_what_render_raises_ends_that_request() -> None:
    def broken(message: Message) -> tuple[bytes, str]:
        raise OSError(f"no ink for {message.header['x0']}")

    program = Program("broken", {"a": Adding(1, [IN], [OUT])}, IN, OUT, parse, broken)
    assert run_local(program, [b"7"]).answers[0].refusal == "render: OSError: no ink for 7"


def test_a_module_that_announced_no_state_may_keep_none() -> None:
    class Sly(_Each):
        def compute(self, messages: list[Message]) -> list[Message]:
            self.state.put(messages[0].request, "x", 1)
            return messages

    answer = run_local(simple({"a": Sly([IN], [OUT], _same)}), [b"1"]).answers[0]
    assert "Sly puts state 'x': it must say is_stateful = True" in answer.refusal


def test_several_outputs_need_a_scatter() -> None:
    modules = {"a": _Each([IN], [S, OUT], _same), "b": _Each([S], [OUT], _same)}
    with pytest.raises(ProgramError, match=r"module a has outputs s, out and no scatter\(\)"):
        simple(modules)


def test_partial_slos_are_stated_by_module_or_by_program() -> None:
    def modules() -> dict[str, StreamModule]:
        return {"a": Adding(1, [IN], [S]), "b": Adding(2, [S], [OUT])}

    found = simple(modules(), partial_slos_s={"b": 0.25}).graph.modules
    assert [module.partial_slo_s for module in found] == [0.0, 0.25]
    for shares in ({"c": 1.0}, {"a": -1.0}, {"a": float("nan")}):
        with pytest.raises(ProgramError, match="seconds of one of a, b are wanted"):
            simple(modules(), partial_slos_s=shares)


def test_a_broken_graph_is_refused_when_the_program_is_made() -> None:
    with pytest.raises(GraphError, match="nobody consumes"):
        simple({"a": _Fork([IN], [S, OUT], _same)})


def test_a_cancelled_request_leaves_nothing_behind_and_the_others_go_on() -> None:
    runtime = LocalRuntime(simple({"a": Adding(3, [IN], [IN, OUT], loop="in")}))
    for body in (b"0", b"1", b"4"):
        runtime.submit(body)
    step = runtime.step("a")
    assert step is not None
    assert step.requests == (0, 1, 2)
    assert runtime.held == {"a": 2}
    runtime.cancel(0)
    answer = runtime.answer(0)
    assert answer is not None
    assert (answer.refusal, answer.http_status) == ("cancelled", 499)
    assert runtime.waiting == {"a": 1}
    while runtime.waiting:
        runtime.step("a")
    assert runtime.held == {}
    assert [bool(found and found.body) for found in map(runtime.answer, range(3))] == [False, True, True]
    runtime.cancel(1)
    assert runtime.answer(1) == runtime.answer(1)


def test_earlier_requests_go_first_and_a_batch_holds_a_request_once() -> None:
    modules: dict[str, StreamModule] = {
        "fork": _Fork([IN], [S, T], _same),
        "both": Adding(1, [S, T], [U]),
        "last": _Each([U], [OUT], _same),
    }
    runtime = LocalRuntime(simple(modules))
    for body in (b"5", b"6", b"7"):
        runtime.submit(body)
    runtime.step("fork")
    steps = [runtime.step("both", 2) for _ in range(3)]
    assert [step.requests for step in steps if step] == [(0, 1), (0, 1), (2,)]
    assert runtime.step("fork") is None


def test_messages_of_several_streams_share_a_batch_and_keep_their_own_ways() -> None:
    def turned(message: Message) -> Message:
        return message.next(message.data, to=["s", "t"] if message.header["x0"] % 2 else ["t", "s"])

    modules: dict[str, StreamModule] = {
        "fork": _Fork([IN], [S, T], turned),
        "both": Adding(1, [S, T], [U]),
        "last": _Each([U], [OUT], _same),
    }
    runtime = LocalRuntime(simple(modules), is_strict=True)
    for body in (b"4", b"5", b"6"):
        runtime.submit(body)
    runtime.step("fork")
    assert [step.requests for step in (runtime.step("both"), runtime.step("last")) if step] == [(0, 1, 2)] * 2


def test_of_header_fields_that_differ_the_first_inputs_stands() -> None:
    def sided(side: str) -> Callable[[Message], Message]:
        return lambda message: message.next(message.data, side=side)

    program = _diamond("sum", sided("left"), sided("right"))
    program.render = lambda message: (message.header["side"].encode(), "text/plain")
    assert [answer.body for answer in run_local(program, [b"1"] * 4, seed=3).answers] == [b"left"] * 4


def test_the_trace_reads_well_and_is_reported() -> None:
    seen: list[str] = []
    run = run_local(
        simple({"a": Adding(3, [IN], [IN, OUT], loop="in")}),
        [b"0", b"1"],
        report=lambda step: seen.append(str(step)),
    )
    assert [line.strip() for line in seen] == [
        "0 a: 0>in  1>out  (evicted a[1])",
        "1 a: 0>in",
        "2 a: 0>in",
        "3 a: 0>out  (evicted a[0])",
    ]
    assert [dict(count) for count in run.executed] == [{"a": 4}, {"a": 1}]
    with pytest.raises(ValueError, match="batch must be at least 0, got -1"):
        run_local(simple({"a": Adding(3, [IN], [OUT])}), [], batch=-1)


class _Scale(NetModule):
    def build(self) -> torch.nn.Module:
        net = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(net.weight, 3.0)
        torch.nn.init.constant_(net.bias, 0.5)
        return net

    def compute(self, messages: list[Message]) -> list[Message]:
        x = torch.stack([message.data["x"].float().view(1) for message in messages])
        return [message.next({"x": y[0]}) for message, y in zip(messages, self.net(x), strict=True)]


@pytest.mark.parametrize("is_inference", [False, True], ids=["plain", "put there under inference mode"])
def test_a_net_module_computes_with_the_parameters_it_is_given(is_inference: bool) -> None:
    def show(message: Message) -> tuple[bytes, str]:
        return str(float(message.data["x"])).encode(), "text/plain"

    def program() -> Program:
        return Program("scale", {"a": _Scale([IN], [OUT])}, IN, OUT, parse, show)

    assert run_local(program(), [b"2"], is_strict=True).answers[0].body == b"6.5"
    with torch.inference_mode(is_inference):
        weights = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([0.0])}
    runtime = LocalRuntime(program(), parameters={"a": weights})
    runtime.submit(b"2")
    runtime.step("a")
    answer = runtime.answer(0)
    assert answer is not None
    assert answer.body == b"4.0"
    with pytest.raises(ProgramError, match="_Scale"):
        LocalRuntime(program(), parameters={"a": {"weight": torch.zeros(1, 1)}})
