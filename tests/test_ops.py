import dataclasses
import io
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import assert_bitwise_equal, random_batch, random_experts
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from rankmoe import front, moe, ops
from rankmoe import schedule as schedule_module
from rankmoe.models.kimi_k3 import KimiK3MoE, KimiK3MoEConfig
from rankmoe.pack import id_space
from rankmoe.types import ExpertPlacement, ExpertSchedule, ExpertWeights, LocalRange, RouterConfig, SiTU, SwiGLU

NUM_EXPERTS, HIDDEN_SIZE, CONFIG = 64, 64, RouterConfig(4)
PLACEMENT = ExpertPlacement(NUM_EXPERTS, 4, 2)
LOCAL_RANGE = PLACEMENT.local_range
BIAS = torch.linspace(-0.1, 0.1, NUM_EXPERTS)
CONFIGS = {
    "sigmoid": CONFIG,
    "softmax": RouterConfig(8, "softmax", renormalize=False, routed_scaling_factor=2.5),
    "softmax_selected": RouterConfig(2, "softmax_selected", slot_order="value"),
    "groups": RouterConfig(4, num_expert_groups=8, topk_groups=2),
}
ACTIVATIONS = {"situ": SiTU(2.0, 9.0), "swiglu": SwiGLU(), "gpt_oss": SwiGLU(1.702, 7.0, 1.0)}
ROUTE_QUANTIZE = torch.ops.rankmoe.route_quantize.default
BUILD_SCHEDULE = torch.ops.rankmoe.build_schedule.default
FUSED_MOE = torch.ops.rankmoe.fused_moe.default


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    counters.clear()


# --- arguments of the operators --------------------------------------------------------------------------------------
def route_arguments(
    num_tokens: int,
    config: RouterConfig = CONFIG,
    schedule: str = "rows",
    *,
    local_range: LocalRange = LOCAL_RANGE,
    dtype: torch.dtype = torch.float32,
    bias: torch.Tensor | None = BIAS,
    num_valid: int | None = None,
    rank_local: bool = True,
) -> tuple[tuple, dict]:
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    valid = None if num_valid is None else torch.tensor([num_valid])
    return (logits.to(dtype), hidden_states.to(dtype), bias, valid), {
        **dataclasses.asdict(config),
        "local_expert_offset": local_range.offset,
        "num_local_experts": local_range.count,
        "rank_local": rank_local,
        "schedule": schedule,
    }


ROUTE_CASES = {
    **{f"{name}_{tokens}": route_arguments(tokens, c) for name, c in CONFIGS.items() for tokens in (1, 5)},
    **{f"tokens_{tokens}": route_arguments(tokens) for tokens in (0, 64, 65)},
    **{f"masks_{tokens}": route_arguments(tokens, schedule="masks") for tokens in (0, 64)},
    **{f"no_schedule_{tokens}": route_arguments(tokens, schedule="none") for tokens in (0, 7, 65)},
    **{
        f"no_range_{kind}": route_arguments(5, schedule=kind, local_range=LocalRange(0, 0))
        for kind in ("rows", "masks")
    },
    "all_experts": route_arguments(5, local_range=LocalRange(0, NUM_EXPERTS)),
    "bfloat16": route_arguments(5, dtype=torch.bfloat16, bias=None),
    "valid_tokens": route_arguments(6, num_valid=4, rank_local=False),
}


def schedule_arguments(
    num_tokens: int,
    dtype: torch.dtype = torch.int32,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int = 16,
) -> tuple[tuple, dict]:
    ids = random_batch(num_tokens, NUM_EXPERTS)[1].topk(4).indices.to(dtype)
    return (ids, expert_map), {
        "num_local_experts": num_local_experts,
        "num_experts": NUM_EXPERTS,
        "local_expert_offset": 0 if expert_map is not None else 16,
        "is_packed": False,
    }


def packed_arguments(num_tokens: int) -> tuple[tuple, dict]:
    (ids, _), others = schedule_arguments(num_tokens)
    return (ids << 16 | 0x3F80, None), {**others, "is_packed": True}


SCHEDULE_CASES = {
    **{f"tokens_{tokens}": schedule_arguments(tokens) for tokens in (0, 1, 5, 64, 65)},
    **{f"packed_{tokens}": packed_arguments(tokens) for tokens in (0, 5, 65)},
    "int64": schedule_arguments(5, torch.int64),
    "uint32": schedule_arguments(5, torch.uint32),
    "map": schedule_arguments(5, expert_map=ExpertPlacement(NUM_EXPERTS, 4, 1, "round_robin").expert_map),
    "no_local_experts": schedule_arguments(5, num_local_experts=0),
    "transposed_ids": ((schedule_arguments(5)[0][0].T.contiguous().T, None), schedule_arguments(5)[1]),
}


def moe_arguments(
    num_tokens: int,
    activation: str = "situ",
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    has_bias: bool = False,
    backend: str = "cpu",
) -> tuple[tuple, dict]:
    result, weights = routed(num_tokens), experts(ACTIVATIONS[activation], has_bias=has_bias, backend=backend)
    kind = weights.activation
    is_situ = isinstance(kind, SiTU)
    return (
        *(
            result.x.data.view(torch.uint8),
            result.x.scale,
            result.routing.topk_weights,
            result.schedule.expert_token_mask,
        ),
        *(result.schedule.expert_offsets, result.schedule.row_tokens, result.schedule.slot_rows),
        *(weights.w13.data, weights.w13.scale, weights.w2.data, weights.w2.scale, weights.w13_bias, weights.w2_bias),
    ), {
        "activation": "situ" if is_situ else "swiglu",
        "activation_constants": [kind.beta, kind.linear_beta] if is_situ else [kind.alpha, kind.up_offset],
        "activation_limit": None if is_situ else kind.limit,
        "backend": backend,
        "out_dtype": out_dtype,
    }


def routed(num_tokens: int, **options) -> front.FrontResult:
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    return ops.route_quantize(logits, hidden_states, CONFIG, BIAS, **{"local_range": LOCAL_RANGE, **options})


def experts(activation=ACTIVATIONS["situ"], placement: ExpertPlacement = PLACEMENT, **options) -> ExpertWeights:
    return random_experts(placement, HIDDEN_SIZE, activation=activation, **options)


MOE_CASES = {
    **{f"tokens_{tokens}": moe_arguments(tokens) for tokens in (0, 1, 5, 65)},
    **{name: moe_arguments(5, name, torch.float32, has_bias=True) for name in ACTIVATIONS},
    "reference": moe_arguments(2, backend="reference"),
}
ALL_CASES = [
    pytest.param(operator, *case, id=f"{operator.__name__.partition('.')[0]}-{name}")
    for operator, cases in ((ROUTE_QUANTIZE, ROUTE_CASES), (BUILD_SCHEDULE, SCHEDULE_CASES), (FUSED_MOE, MOE_CASES))
    for name, case in cases.items()
]


# --- the operators ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("operator", "arguments", "options"), ALL_CASES)
def test_opcheck_passes(operator, arguments, options):
    torch.library.opcheck(operator, arguments, options)


def tensors_in(result: torch.Tensor | tuple) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize(("operator", "arguments", "options"), ALL_CASES)
def test_fake_results_have_the_shapes_layouts_dtypes_and_devices_of_the_real_ones(operator, arguments, options):
    real = tensors_in(operator(*arguments, **options))
    with FakeTensorMode() as mode:
        fake_arguments = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = tensors_in(operator(*fake_arguments, **options))

    def properties(tensor: torch.Tensor) -> tuple:
        return tensor.shape, tensor.is_contiguous(), tensor.dtype, tensor.device

    assert [properties(f) for f in fake] == [properties(r) for r in real]


@pytest.mark.parametrize(("operator", "arguments", "options"), ALL_CASES)
def test_results_share_no_memory_with_arguments_or_each_other(operator, arguments, options):
    def storages(tensors: tuple) -> list[int]:
        return [t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor) and t.numel()]

    results = storages(tensors_in(operator(*arguments, **options)))
    assert len(set(results)) == len(results)
    assert not set(results) & set(storages(arguments))


def test_only_importing_ops_registers_operators():
    code = (
        "import torch, rankmoe\n"
        "registered = lambda: [n for n in torch._C._dispatch_get_all_op_names() if n.startswith('rankmoe::')]\n"
        "assert registered() == [], registered()\n"
        "import rankmoe.ops\n"
        "assert sorted(registered()) == ['rankmoe::build_schedule', 'rankmoe::fused_moe', 'rankmoe::route_quantize']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the functions around them ---------------------------------------------------------------------------------------
def padded(schedule: ExpertSchedule) -> ExpertSchedule:
    row_tokens = schedule.slot_rows.new_full((schedule.slot_rows.numel(),), -1)
    row_tokens[: schedule.row_tokens.shape[0]] = schedule.row_tokens
    return dataclasses.replace(schedule, row_tokens=row_tokens)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 64, 65, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_local": False},
        {"schedule": "none"},
        {"local_range": None},
        {"local_range": LocalRange(0, 0)},
        {"local_range": LocalRange(0, NUM_EXPERTS)},
        {"local_range": LocalRange(63, 1)},
        {"num_valid_tokens": torch.tensor([5])},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_route_quantize_is_that_of_front_with_padded_rows(num_tokens, options, config):
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    options = {"local_range": LOCAL_RANGE, **options}
    expected = front.route_quantize(logits, hidden_states, config, BIAS, **options)
    if expected.schedule is not None:
        expected = dataclasses.replace(expected, schedule=padded(expected.schedule))
    assert_bitwise_equal(ops.route_quantize(logits, hidden_states, config, BIAS, **options), expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_masks_alone_are_those_of_front(num_tokens):
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    expected = front.route_quantize(logits, hidden_states, CONFIG, BIAS, local_range=LOCAL_RANGE, schedule="masks")
    assert_bitwise_equal(routed(num_tokens, schedule="masks"), expected)


@pytest.mark.parametrize("num_tokens", [0, 5, 64, 65])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
@pytest.mark.parametrize(
    "placement", [PLACEMENT, ExpertPlacement(NUM_EXPERTS, 4, 1, "round_robin")], ids=["range", "map"]
)
def test_build_schedule_from_ids_is_that_of_schedule(num_tokens, dtype, placement):
    ids = routed(num_tokens).routing.topk_ids.to(dtype)
    options = {"num_experts": NUM_EXPERTS}
    if placement.local_range is None:
        options["expert_map"] = placement.expert_map
    else:
        options["local_expert_offset"] = placement.local_expert_offset
    expected = schedule_module.build_schedule(ids, placement.num_local_experts, **options)
    assert_bitwise_equal(ops.build_schedule(ids, placement.num_local_experts, **options), padded(expected))


@pytest.mark.parametrize("rank_local", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 5, 65])
def test_build_schedule_from_packed_ids_is_that_of_the_front(num_tokens, rank_local):
    result = routed(num_tokens, rank_local=rank_local)
    space = id_space(result.routing, NUM_EXPERTS, LOCAL_RANGE)
    schedule = ops.build_schedule(
        result.routing.packed,
        LOCAL_RANGE.count,
        num_experts=space.num_experts,
        local_expert_offset=space.local_expert_offset,
        is_packed=True,
    )
    assert_bitwise_equal(schedule, result.schedule)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 65])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fused_moe_is_that_of_moe(num_tokens, activation, has_bias, out_dtype):
    weights = experts(ACTIVATIONS[activation], has_bias=has_bias)
    hidden_states, logits = random_batch(num_tokens, NUM_EXPERTS)
    result = front.route_quantize(logits, hidden_states, CONFIG, BIAS, local_range=LOCAL_RANGE, rank_local=False)
    expected = moe.fused_moe(
        result.x,
        result.routing,
        weights,
        num_experts=NUM_EXPERTS,
        local_expert_offset=LOCAL_RANGE.offset,
        out_dtype=out_dtype,
    )
    for schedule in (result.schedule, padded(result.schedule)):
        got = ops.fused_moe(result.x, result.routing.topk_weights, schedule, weights, out_dtype=out_dtype)
        assert_bitwise_equal(got, expected)


PLACEMENTS = {
    "range": PLACEMENT,
    "uneven": ExpertPlacement(NUM_EXPERTS, 7, 6),
    "all": ExpertPlacement(NUM_EXPERTS),
    "round_robin": ExpertPlacement(NUM_EXPERTS, 4, 1, "round_robin"),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("rank_local", [True, False])
def test_routed_moe_is_that_of_moe(placement, rank_local):
    weights = experts(placement=placement)
    hidden_states, logits = random_batch(6, NUM_EXPERTS)
    options = {"rank_local": rank_local, "num_valid_tokens": torch.tensor([4]), "out_dtype": torch.float32}
    expected = moe.routed_moe(hidden_states, logits, weights, CONFIG, BIAS, **options)
    assert_bitwise_equal(ops.routed_moe(hidden_states, logits, weights, CONFIG, BIAS, **options), expected)


# --- compiled --------------------------------------------------------------------------------------------------------
WEIGHTS = experts()
GATE = torch.randn(HIDDEN_SIZE, NUM_EXPERTS, generator=torch.Generator().manual_seed(7))


def layer(hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None, package=ops) -> torch.Tensor:
    """A router before and a residual after, so that compiled code surrounds the operators."""
    logits = hidden_states.float() @ GATE
    out = package.routed_moe(hidden_states, logits, WEIGHTS, CONFIG, BIAS, num_valid_tokens=num_valid_tokens)
    return hidden_states + 2 * out


def compiled(function: Callable, dynamic: bool = True) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_one_graph_serves_all_token_counts_that_have_masks_and_another_the_rest():
    run = compiled(layer)
    for num_tokens in (8, 2, 33, 64):
        hidden_states, _ = random_batch(num_tokens, NUM_EXPERTS)
        assert_bitwise_equal(run(hidden_states), layer(hidden_states, package=moe))
    assert num_graphs() == 1
    for num_tokens in (65, 200):
        hidden_states, _ = random_batch(num_tokens, NUM_EXPERTS)
        assert_bitwise_equal(run(hidden_states), layer(hidden_states, package=moe))
    assert num_graphs() == 2


def test_a_padded_batch_never_compiles_again():
    run = compiled(layer, dynamic=False)
    hidden_states, _ = random_batch(64, NUM_EXPERTS)
    whole = layer(hidden_states, package=moe)
    for num_valid in (64, 1, 7, 0, 63):
        got = run(hidden_states, torch.tensor([num_valid]))
        assert_bitwise_equal(got[:num_valid], whole[:num_valid])
        assert_bitwise_equal(got[num_valid:], hidden_states[num_valid:])
    assert num_graphs() == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token_compile(num_tokens):
    hidden_states, _ = random_batch(num_tokens, NUM_EXPERTS)
    assert_bitwise_equal(compiled(layer)(hidden_states), layer(hidden_states, package=moe))


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_without_redundant_experts_compiles(placement):
    weights = experts(placement=placement, activation=ACTIVATIONS["gpt_oss"], has_bias=True)
    run = compiled(lambda hidden_states, logits: ops.routed_moe(hidden_states, logits, weights, CONFIG))
    hidden_states, logits = random_batch(6, NUM_EXPERTS)
    assert_bitwise_equal(run(hidden_states, logits), moe.routed_moe(hidden_states, logits, weights, CONFIG))


@pytest.mark.parametrize("schedule", ["none", "masks", "rows"])
def test_a_front_result_leaves_a_compiled_function(schedule):
    def function(hidden_states: torch.Tensor, logits: torch.Tensor) -> front.FrontResult:
        return ops.route_quantize(logits, hidden_states, CONFIG, BIAS, local_range=LOCAL_RANGE, schedule=schedule)

    inputs = random_batch(6, NUM_EXPERTS)
    assert_bitwise_equal(compiled(function)(*inputs), function(*inputs))


class OperatorKimiK3MoE(KimiK3MoE):
    """The block with its routed part as operators."""

    def routed_partial(self, hidden_states: torch.Tensor, num_valid_tokens: torch.Tensor | None = None) -> torch.Tensor:
        return ops.routed_moe(
            self.routed_expert_down_proj(hidden_states),
            self.gate(hidden_states),
            self.runner.weights,
            self.config.router,
            self.gate.e_score_correction_bias,
            rank_local=self.rank_local,
            num_valid_tokens=num_valid_tokens,
            out_dtype=self.reduce_dtype,
        )


def kimi_blocks() -> tuple[KimiK3MoE, KimiK3MoE]:
    config = KimiK3MoEConfig(96, HIDDEN_SIZE, NUM_EXPERTS, 32, 64, router=CONFIG, activation=ACTIVATIONS["situ"])
    blocks = KimiK3MoE(config).bfloat16(), OperatorKimiK3MoE(config).bfloat16()
    blocks[1].load_state_dict(blocks[0].state_dict())
    for block in blocks:
        block.bind_experts(experts(placement=ExpertPlacement(NUM_EXPERTS)))
    return blocks


@torch.no_grad()
def test_a_compiled_kimi_k3_block_gives_the_bits_of_the_block():
    block, operator_block = kimi_blocks()
    run = compiled(operator_block)
    for num_tokens in (5, 9):
        hidden_states, _ = random_batch(num_tokens, NUM_EXPERTS, 96)
        assert_bitwise_equal(run(hidden_states), block(hidden_states))
    assert num_graphs() == 1


# --- exported --------------------------------------------------------------------------------------------------------
class Layer(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return layer(hidden_states)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_keeps_the_operators_and_the_bits(strict):
    hidden_states, _ = random_batch(8, NUM_EXPERTS)
    num_tokens = torch.export.Dim("num_tokens", max=64)
    program = torch.export.export(Layer(), (hidden_states,), dynamic_shapes=({0: num_tokens},), strict=strict)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert [called.count(operator) for operator in (ROUTE_QUANTIZE, FUSED_MOE)] == [1, 1]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    for tokens in (2, 8, 64):
        hidden_states, _ = random_batch(tokens, NUM_EXPERTS)
        assert_bitwise_equal(run(hidden_states), layer(hidden_states, package=moe))


# --- gradients -------------------------------------------------------------------------------------------------------
def test_a_backward_pass_through_the_front_is_refused():
    hidden_states, logits = random_batch(3, NUM_EXPERTS)
    logits.requires_grad_()
    result = ops.route_quantize(logits, hidden_states, CONFIG, BIAS, local_range=LOCAL_RANGE)
    assert_bitwise_equal(result.routing.topk_weights.detach(), routed(3).routing.topk_weights)
    with pytest.raises(NotImplementedError, match="rankmoe::route_quantize has no backward"):
        result.routing.topk_weights.sum().backward()


def test_a_backward_pass_through_the_experts_is_refused():
    result = routed(3)
    topk_weights = result.routing.topk_weights.clone().requires_grad_()
    out = ops.fused_moe(result.x, topk_weights, result.schedule, WEIGHTS)
    with pytest.raises(NotImplementedError, match="rankmoe::fused_moe has no backward"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_compiling_for_a_backward_pass_is_refused():
    hidden_states, _ = random_batch(3, NUM_EXPERTS)
    run = compiled(layer)
    with pytest.raises(Exception, match=r"rankmoe::\w+ has no backward: .* torch.no_grad"):
        run(hidden_states.requires_grad_())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_require_gradients_are_no_obstacle_without_them(mode):
    hidden_states, _ = random_batch(3, NUM_EXPERTS)
    expected = layer(hidden_states, package=moe)
    hidden_states.requires_grad_()
    with mode():
        assert_bitwise_equal(layer(hidden_states), expected)
        assert_bitwise_equal(compiled(layer)(hidden_states), expected)


# --- errors ----------------------------------------------------------------------------------------------------------
BAD_FRONTS = {
    "tokens": ({"logits": torch.zeros(4, NUM_EXPERTS)}, "router_logits: expected 5 tokens as hidden_states, got 4"),
    "logits_dtype": (
        {"logits": torch.zeros(5, NUM_EXPERTS, dtype=torch.float16)},
        "router_logits: expected float32 or bfloat16, got torch.float16",
    ),
    "hidden_size": (
        {"hidden_states": torch.zeros(5, 48)},
        r"hidden_states.shape\[1\]: expected a multiple of 32, got 48",
    ),
    "bias": ({"bias": torch.zeros(3)}, r"correction_bias: expected \(64,\), got \(3,\)"),
    "range": ({"local_range": LocalRange(60, 8)}, "num_experts=64, got offset=60, count=8"),
    "top_k": ({"config": RouterConfig(65)}, "top_k: expected at most 64, .* got 65"),
}


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("changes", "message"), BAD_FRONTS.values(), ids=BAD_FRONTS)
def test_bad_inputs_of_the_front_are_named(changes, message, is_compiled):
    hidden_states, logits = random_batch(5, NUM_EXPERTS)
    inputs = {
        **{"logits": logits, "hidden_states": hidden_states, "config": CONFIG, "bias": BIAS},
        **{"local_range": LOCAL_RANGE},
        **changes,
    }

    def function(logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        options = {"local_range": inputs["local_range"]}
        return ops.route_quantize(logits, hidden_states, inputs["config"], inputs["bias"], **options).x.data

    run = compiled(function, dynamic=False) if is_compiled else function
    # Errors while a graph is traced are RuntimeErrors that hold the message.
    with pytest.raises(RuntimeError if is_compiled else (TypeError, ValueError), match=message):
        run(inputs["logits"], inputs["hidden_states"])


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(5, 4), {}, "topk_ids: expected int32, int64 or uint32, got torch.float32"),
        (torch.zeros(5, 4, dtype=torch.int64), {"is_packed": True}, "expected int32.*, got torch.int64"),
        (
            torch.zeros(5, 4, dtype=torch.int32),
            {"local_expert_offset": 60},
            "num_experts=64, got offset=60, num_local_experts=16",
        ),
    ],
    ids=["dtype", "packed_dtype", "offset"],
)
def test_bad_inputs_of_the_schedule_are_named(ids, options, message, is_compiled):
    def function(ids: torch.Tensor) -> torch.Tensor:
        return ops.build_schedule(ids, 16, num_experts=NUM_EXPERTS, **options).slot_rows

    run = compiled(function, dynamic=False) if is_compiled else function
    with pytest.raises(RuntimeError if is_compiled else (TypeError, ValueError), match=message):
        run(ids)


def test_masks_alone_are_refused_for_more_tokens_than_a_mask_has_bits():
    with pytest.raises(ValueError, match=r"schedule: .*64.*65"):
        routed(65, schedule="masks")


def test_bad_inputs_of_the_experts_are_named():
    result = routed(5)
    with pytest.raises(ValueError, match=r"x: expected mxfp8 \(5, 32\), got mxfp8 \(5, 64\)"):
        ops.fused_moe(result.x, result.routing.topk_weights, result.schedule, random_experts(PLACEMENT, 32))
    whole = experts(placement=ExpertPlacement(NUM_EXPERTS))
    with pytest.raises(ValueError, match="schedule: expected 64 local experts as the weights, got 16"):
        ops.fused_moe(result.x, result.routing.topk_weights, result.schedule, whole)


def test_the_layer_refuses_redundant_experts_and_logits_of_another_model():
    hidden_states, logits = random_batch(5, NUM_EXPERTS)
    redundant = experts(placement=ExpertPlacement(8, physical_to_logical=(0, 1, 2, 3, 0, 1, 2, 3)))
    with pytest.raises(ValueError, match=r"weights\.placement: expected no redundant experts"):
        ops.routed_moe(hidden_states, logits, redundant, CONFIG)
    with pytest.raises(ValueError, match=r"router_logits: expected \[num_tokens, 64\] .*, got \(5, 32\)"):
        ops.routed_moe(hidden_states, logits[:, :32], WEIGHTS, CONFIG)


def test_rows_beyond_the_valid_tokens_may_hold_nan():
    hidden_states, logits = random_batch(6, NUM_EXPERTS)
    expected = moe.routed_moe(hidden_states[:4], logits[:4], WEIGHTS, CONFIG, BIAS)
    hidden_states[4:], logits[4:] = math.nan, math.nan
    got = ops.routed_moe(hidden_states, logits, WEIGHTS, CONFIG, BIAS, num_valid_tokens=torch.tensor([4]))
    assert_bitwise_equal(got, torch.cat([expected, torch.zeros_like(expected[:2])]))


def test_weights_with_scale_factors_are_refused_by_name():
    weights = dataclasses.replace(experts(), w13_factor=torch.ones(1))
    hidden_states, logits = random_batch(3, NUM_EXPERTS)
    result = ops.route_quantize(logits, hidden_states, CONFIG, local_range=weights.placement.local_range)
    with pytest.raises(ValueError, match="weights: expected a backend without scale factors"):
        ops.fused_moe(result.x, result.routing.topk_weights, result.schedule, weights)
