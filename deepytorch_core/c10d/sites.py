"""Every known place that asks for "nccl", "gloo" or their classes, and what ours means there.

docs/backend-sites.md is made from this table, and a test compares the two. `get_backend()` and
whatever else tells a group's name say what was asked for. So code that asks for the name takes the
same branch as without deepytorch. The class of the backend is ours. Where that did harm, or the
name "deepytorch" that somebody asked for would, deepytorch_core/c10d/backend_checks.py replaces the
function (undone by `deactivate`); elsewhere the table says what happens and why that is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_SITES_TEST = "tests/multiproc/test_backend_sites.py"
_ACTIVATION_TEST = "tests/multiproc/test_activation.py"
_UNIT_TEST = "tests/unit"

FRAMEWORKS = {
    "torch": "2.13.0 (names checked in 2.11.0, 2.14.1 and 2.15.0)",
    "deepspeed": "0.19.8",
    "accelerate": "1.15.0",
    "transformers": "5.23.0",
    "megatron-core": "0.16.1",
    "lightning": "2.6.6",
}
"""The versions that were read."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place: `where` is file:function inside the framework's package."""

    framework: str
    where: str
    asks: str
    with_ours: str
    remedy: str = "none needed"
    test: str = ""


def _torch(where: str, asks: str, with_ours: str, **rest: str) -> Site:
    return Site(framework="torch", where=where, asks=asks, with_ours=with_ours, **rest)


_C10D = "distributed/distributed_c10d.py:"

TORCH = (
    _torch(
        _C10D + "init_process_group",
        "backend None, nccl, gloo, device:backend pairs",
        "rewritten by the rules in deepytorch_core/c10d/rewrite.py",
        remedy="the point of it; through `_new_process_group_helper`",
        test=f"{_ACTIVATION_TEST}::test_groups_made_after_the_import",
    ),
    _torch(
        _C10D + "_new_group_with_tag",
        "the default group's name when backend is None",
        "the name that was asked for, from which the devices of ours follow",
        remedy="replaced: tells `_new_process_group_helper` that it is a sub-group",
        test=f"{_ACTIVATION_TEST}::test_nccl_becomes_ours_for_cuda_only",
    ),
    _torch(
        _C10D + "_new_process_group_helper",
        "a default backend type, looked up for pairs by NCCL's name only (torch <= 2.13)",
        "ours is registered under the type of the stock backend it stands for, which "
        "`ProcessGroup.name()` tells; asked for as deepytorch, under CUSTOM",
        remedy="set after creation; that ours is installed is kept from torch's choice for others",
        test=f"{_ACTIVATION_TEST}::test_nccl_becomes_ours_for_cuda_only",
    ),
    _torch(
        _C10D + "_get_default_timeout",
        "10 minutes for nccl, 30 for all others",
        "the same, by the name that was asked for; option timeout_s where it is set. An explicit "
        "timeout wins even if it has the same value",
        remedy="looked up by that name; replaced in `_new_process_group_helper`, by identity",
        test=f"{_UNIT_TEST}/test_backend.py::test_an_explicit_timeout_wins_even_if_it_equals_the_default",
    ),
    _torch(
        _C10D + "Backend.backend_type_map",
        "the C++ type of a name",
        "CUSTOM, of which a group holds one: beside another custom backend ours would take its "
        "place",
        remedy="such pairs are left alone",
        test=f"{_UNIT_TEST}/test_rewrite.py::test_reason_for_leaving_a_foreign_backend_alone",
    ),
    _torch(
        _C10D + "monitored_barrier",
        'the name "gloo" (torch <= 2.13)',
        "our backend hands it to gloo; a group asked for as deepytorch would be refused",
        remedy='replaced for the name "deepytorch"',
        test=f"{_SITES_TEST}::test_monitored_barrier_names_the_absent_rank",
    ),
    _torch(
        _C10D + "_set_pg_timeout",
        "isinstance ProcessGroupNCCL, ProcessGroupGloo (torch <= 2.13)",
        "would warn and do nothing",
        remedy="replaced: sets it on our backend, which passes it to its delegates",
        test=f"{_SITES_TEST}::test_set_pg_timeout_reaches_our_backend",
    ),
    _torch(
        _C10D + "split_group",
        "a backend that splits communicators (NCCL)",
        "would raise; a DeviceMesh calls it when init_process_group got a device_id",
        remedy="replaced: makes the group by new_group",
        test=f"{_SITES_TEST}::test_split_group_makes_the_groups",
    ),
    _torch(
        _C10D + "shrink_group",
        "a backend that shrinks communicators (NCCL)",
        'raises "does not support shrinking", as for gloo',
        remedy="none yet: destroy and initialise again, or collectives=stock",
    ),
    _torch(
        _C10D + "_add_ephemeral_timeout_for_all_pgs",
        "isinstance ProcessGroupNCCL",
        "NCCL behind ours would not get the extension while one rank compiles",
        remedy="replaced: extends NCCL delegates too",
        test=f"{_UNIT_TEST}/test_torch_sites.py::test_ephemeral_timeouts_reach_nccl_delegates",
    ),
    _torch(
        _C10D + "_abort_process_group",
        "isinstance ProcessGroupNCCL, to abort all communicators in one NCCL group",
        "communicators would be aborted one by one and might wait for each other",
        remedy="replaced: opens the NCCL group through a delegate",
        test=f"{_UNIT_TEST}/test_torch_sites.py::test_abort_opens_one_nccl_group",
    ),
    _torch(
        _C10D + "_get_process_group_uid",
        "isinstance ProcessGroupNCCL",
        "-1, as for gloo; used for display only",
        test=f"{_SITES_TEST}::test_questions_about_devices_have_the_answers_of_a_cpu_group",
    ),
    _torch(
        _C10D + "barrier, _get_object_coll_device, _get_pg_default_device, _device_capability",
        "the group's device types",
        "the same devices as stock: ours is registered for the devices that were asked for",
        test=f"{_SITES_TEST}::test_questions_about_devices_have_the_answers_of_a_cpu_group",
    ),
    _torch(
        _C10D + "all_gather_object and the other object collectives",
        "the group's device types",
        "the same device as stock",
        test=f"{_SITES_TEST}::test_object_collectives",
    ),
    _torch(
        _C10D + "batch_isend_irecv",
        "a backend that coalesces, whose batch has one Work and one place per group",
        "ours does, for GPUs; with CPU tensors batches of two threads would mix, and one that "
        "fails would leave the group noting down collectives instead of running them",
        remedy="replaced for CPU tensors: each message starts by itself, as with gloo",
        test=f"{_SITES_TEST}::test_batches_of_sends_and_receives",
    ),
    _torch(
        _C10D + "_create_process_group_wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL)",
        "a known name or a registered plugin",
        "wrapped like the others",
        test=f"{_SITES_TEST}::test_torchs_detailed_debugging_wraps_ours",
    ),
    _torch(
        "distributed/device_mesh.py:_init_one_process_group",
        'the name "gloo", to make an NCCL group beside it on machines with GPUs',
        "as stock: the group beside it is asked for as pairs, so both devices are ours",
        test=f"{_SITES_TEST}::test_dtensor_and_a_mesh_of_two_dimensions",
    ),
    _torch(
        "distributed/nn/functional.py:_AllGather.backward",
        'the name "nccl" for reduce_scatter, else all_to_all of lists',
        'as stock; for the name "deepytorch" all_to_all of lists, which gloo hasn\'t',
        remedy='replaced for the name "deepytorch": reduce_scatter',
        test=f"{_SITES_TEST}::test_dist_nn_all_gather_and_its_gradient",
    ),
    _torch(
        "distributed/nn/functional.py:_AllGatherBase.backward",
        'the name "nccl", else "Backend not supported!"',
        'as stock; for the name "deepytorch" it would raise where NCCL worked',
        remedy='replaced for the name "deepytorch": reduce_scatter',
        test=f"{_SITES_TEST}::test_dist_nn_all_gather_base_has_a_gradient",
    ),
    _torch(
        "distributed/nn/functional.py:_AlltoAll.forward",
        'the name "gloo" for scatters, else all_to_all of lists',
        'as stock; for the name "deepytorch" all_to_all of lists, which gloo hasn\'t',
        remedy='replaced for the name "deepytorch" and CPU tensors: all_to_all_single',
        test=f"{_SITES_TEST}::test_dist_nn_all_to_all_of_lists_and_its_gradient",
    ),
    _torch(
        "distributed/_shard/sharded_tensor/api.py:_get_preferred_device",
        "nccl, gloo, else the first device of the backend's name that is not cpu",
        'as stock; the name "deepytorch" might ask a torch without CUDA for its CUDA device',
        remedy="that name is registered for cuda only where torch has it",
        test=f"{_SITES_TEST}::test_sharded_tensor_prefers_the_right_device",
    ),
    _torch(
        "distributed/_shard/sharded_tensor/api.py:to, _ops/tensor_ops.py:tensor_device",
        'the name "gloo", for ranks without a shard',
        'as stock; for the name "deepytorch" such a rank answers with the current CUDA device',
        remedy="none: deprecated class, use DTensor; ranks with a shard are not affected",
        test=f"{_SITES_TEST}::test_sharded_tensor_prefers_the_right_device",
    ),
    _torch(
        "distributed/checkpoint/state_dict_saver.py:async_save",
        "cpu among the default group's devices",
        "as with stock: there with None and gloo, absent with nccl; its own gloo group stays gloo",
        test=f"{_SITES_TEST}::test_asynchronous_checkpoint",
    ),
    _torch(
        "distributed/checkpoint/_async_process_executor.py",
        "initialises gloo in a process of its own",
        "untouched unless that process imports deepytorch, and then all of them do",
    ),
    _torch(
        "distributed/fsdp/_init_utils.py:_init_inter_node_process_group",
        "the default group's name, to make groups alike",
        "the same name for its sub-groups, so they become ours likewise",
    ),
    _torch(
        "distributed/algorithms/ddp_comm_hooks/ddp_zero_hook.py:hook_with_zero_step(_interleaved)",
        'the name "gloo", to refuse overlapping (it may hang on gloo)',
        'as stock; for the name "deepytorch" ranks would enter different operations',
        remedy='refused for the name "deepytorch" and CPU tensors, as with gloo',
        test=f"{_SITES_TEST}::test_overlapped_zero_is_refused_on_the_host",
    ),
    _torch(
        "nn/modules/_functions.py:SyncBatchNorm.forward",
        'the name "gloo", to avoid all_gather_into_tensor',
        "as stock",
    ),
    _torch(
        "distributed/rpc/backend_registry.py:_init_process_group",
        "makes ProcessGroupGloo by its class",
        "untouched",
        test=f"{_SITES_TEST}::test_rpc_keeps_to_gloo",
    ),
    _torch(
        "utils/data/dataloader.py:_BaseDataLoaderIter",
        "new_group of gloo for a pipe's shared seed",
        "gloo, or ours when the whole job was asked for as gloo",
        test=f"{_SITES_TEST}::test_data_loaders_group_of_their_own",
    ),
    _torch(
        "profiler/profiler.py:_get_distributed_info, distributed/c10d_logger.py",
        'the name "nccl", to record its version',
        "as stock; events bear stock's names, too (gloo:all_reduce)",
        test=f"{_SITES_TEST}::test_profiler_describes_the_job",
    ),
    _torch(
        "_inductor/comm_analysis.py:estimate_nccl_collective_runtime_from_fx_node",
        "a CUDA backend that estimates times",
        "ours doesn't, so inductor uses its formula",
    ),
    _torch(
        "distributed/_dist2.py:new_group",
        "its own registry of gloo and nccl",
        "untouched: deepytorch is not in it",
    ),
)

OTHERS = (
    Site(
        framework="deepspeed",
        where="comm/torch.py:init_process_group",
        asks="get_backend() == 'mpi'",
        with_ours="false, as for nccl; device_id= is passed, see split_group",
        test=f"{_SITES_TEST}::test_split_group_makes_the_groups",
    ),
    Site(
        framework="deepspeed",
        where="comm/comm.py:init_deepspeed_backend, set_backend; env_report.py",
        asks="the accelerator's communication_backend_name() == 'nccl'",
        with_ours="still nccl: the accelerator's name is not rewritten",
    ),
    Site(
        framework="deepspeed",
        where="comm/comm.py:init_distributed",
        asks="passes 'nccl' or 'gloo' to init_process_group",
        with_ours="rewritten like any other",
        test=f"{_ACTIVATION_TEST}::test_groups_made_after_the_import",
    ),
    Site(
        framework="accelerate",
        where="state.py:PartialState.__init__",
        asks="backend == 'nccl' to add cpu:gloo for FSDP, then init_process_group",
        with_ours="its own record keeps the name it chose; the argument is rewritten pair by pair",
        test=f"{_UNIT_TEST}/test_rewrite.py::test_default_group",
    ),
    Site(
        framework="accelerate",
        where="utils/operations.py:_gpu_gather_one",
        asks="its own record != 'gloo', to gather into one tensor",
        with_ours="the branch of the name it chose; ours serves both",
    ),
    Site(
        framework="accelerate",
        where="utils/dataclasses.py:InitProcessGroupKwargs",
        asks="backend != 'nccl' for a timeout of 1800 s, else 600 s",
        with_ours="passed explicitly, so it wins over timeout_s",
        test=f"{_UNIT_TEST}/test_backend.py::test_an_explicit_timeout_wins_even_if_it_equals_the_default",
    ),
    Site(
        framework="transformers",
        where="distributed/utils.py:_ensure_torch_distributed",
        asks="passes device_id with nccl, because a mesh then splits groups",
        with_ours="see split_group",
        test=f"{_SITES_TEST}::test_split_group_makes_the_groups",
    ),
    Site(
        framework="transformers",
        where="distributed/pipeline_parallel.py:PipelineStage.__init__",
        asks="get_backend() == 'gloo', to move activations to the CPU first",
        with_ours="as stock",
    ),
    Site(
        framework="transformers",
        where="generation/continuous_batching/distributed.py",
        asks="new_group of gloo for control messages",
        with_ours="stays gloo",
        test=f"{_ACTIVATION_TEST}::test_groups_made_after_the_import",
    ),
    Site(
        framework="transformers",
        where="training_args.py:ddp_backend",
        asks="a fixed list of names",
        with_ours="pass nccl or gloo, which is rewritten, or leave it out",
    ),
    Site(
        framework="megatron-core",
        where="core/parallel_state.py:create_group, get_nccl_options",
        asks="backend None for most groups, ProcessGroupNCCL.Options as pg_options",
        with_ours="the default group's; the options go to the NCCL delegate",
        test=f"{_UNIT_TEST}/test_backend.py::test_options_of_other_backends_are_tolerated",
    ),
    Site(
        framework="megatron-core",
        where="core/parallel_state.py:initialize_model_parallel (..._GLOO groups)",
        asks="new_group of gloo for checkpoints",
        with_ours="stays gloo",
        test=f"{_ACTIVATION_TEST}::test_an_explicit_group_needs_no_upgrade_and_its_gloo_companion_stays",
    ),
    Site(
        framework="megatron-core",
        where="core/pipeline_parallel/p2p_communication.py:_p2p_ops",
        asks="get_backend() != 'ucc'",
        with_ours="true, as for nccl and gloo",
    ),
    Site(
        framework="megatron-core",
        where="core/pipeline_parallel/bridge_communicator.py",
        asks="new_group of nccl",
        with_ours="rewritten to cuda:deepytorch",
        test=f"{_ACTIVATION_TEST}::test_nccl_becomes_ours_for_cuda_only",
    ),
    Site(
        framework="megatron-core",
        where="core/nccl_allocator.py (nccl_ub=True)",
        asks="the backend's register_mem_pool",
        with_ours="ours has none: fails at the first registration",
        remedy="leave nccl_ub off, or collectives=stock",
    ),
    Site(
        framework="megatron-core",
        where="core/resharding/refit.py",
        asks="its own option nccl, gloo, nvshmem",
        with_ours="untouched; its gloo group stays gloo",
    ),
    Site(
        framework="megatron-core",
        where="core/utils.py:StragglerDetector.configure",
        asks="get_backend() == 'nccl' for the device of its messages, else cpu",
        with_ours="as stock",
        test="tests/multiproc/test_backend_names.py::test_programs_that_branch_on_the_name_take_their_branch",
    ),
    Site(
        framework="lightning",
        where="fabric/utilities/distributed.py:_sync_ddp",
        asks="get_backend() == 'gloo', to divide sums itself",
        with_ours='as stock; the name "deepytorch" is asked for means, of whole numbers too',
        remedy="means of whole numbers between CPU ranks are NCCL's: sums, divided towards zero",
        test="tests/conformance/test_c10d_types.py::test_means_of_whole_numbers",
    ),
    Site(
        framework="lightning",
        where="pytorch/loops/utilities.py:_no_grad_context",
        asks="get_backend() == 'gloo', to evaluate under no_grad",
        with_ours="as stock; a group asked for as deepytorch evaluates under inference_mode",
        test="tests/conformance/test_c10d_types.py::test_means_of_whole_numbers",
    ),
    Site(
        framework="lightning",
        where="fabric/strategies/ddp.py:barrier and those of the other strategies",
        asks="get_backend() == 'nccl', to name the device",
        with_ours="as stock",
    ),
    Site(
        framework="lightning",
        where="fabric/utilities/distributed.py:_InfiniteBarrier",
        asks="new_group of gloo and its monitored_barrier",
        with_ours="gloo, or ours when the whole job was asked for as gloo, which hands it to gloo",
        test=f"{_SITES_TEST}::test_monitored_barrier_names_the_absent_rank",
    ),
)

SITES: tuple[Site, ...] = TORCH + OTHERS


def markdown(sites: Iterable[Site] = SITES) -> str:
    """The table as docs/backend-sites.md shows it."""
    lines = [
        "# Places that ask for a backend by name or class",
        "",
        "Made from `deepytorch_core/c10d/sites.py`; change that, then run",
        "`python -c 'from deepytorch_core.c10d import sites; "
        'sites.write("docs/backend-sites.md")\'`.',
        "",
        "`import deepytorch` changes what serves a group, not what it is called: `get_backend()`",
        'says what was asked for, and "deepytorch" only where that was. An `isinstance` with',
        "ProcessGroupNCCL or ProcessGroupGloo is false. The table says what that means everywhere",
        "it is known to matter.",
    ]
    for framework, version in FRAMEWORKS.items():
        lines += [
            "",
            f"## {framework} {version}",
            "",
            "| where | asks for | with deepytorch | remedy | test |",
            "|---|---|---|---|---|",
        ]
        for site in sites:
            if site.framework == framework:
                test = f"`{site.test.split('::')[-1]}`" if site.test else "read"
                cells = (f"`{site.where}`", site.asks, site.with_ours, site.remedy, test)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", '"read" in the last column: from the source, no test runs it.', ""]
    return "\n".join(lines)


def write(path: str) -> None:
    """Write the document."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(markdown())
