"""Every hook, argument, config key and result of Flower's strategies: honoured or refused. The
table in docs/plug-in.md is made here: `python tests/flower/test_faithful.py` writes it.

A newer Flower with a further hook or argument fails these tests until it is decided. Each row names
the test that shows it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from flwr.serverapp.strategy import FedAvg, Result, Strategy

from bayflower import strategies
from bayflower.flower import configs, hooks

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "plug-in.md"
MARKS = ("<!-- flower's strategy: written by tests/flower/test_faithful.py -->", "<!-- end -->")
YES, PART, NO = "honoured", "in part", "refused"
# kind: name: (verdict, what it means here, the test that shows it)
DECISIONS: dict[str, dict[str, tuple[str, str, str]]] = {
    "hook": {
        "configure_train": (
            YES,
            "called in every round. Return the messages of `super()`: all, fewer, none, or with "
            "further records. Messages made from nothing are refused",
            "test_configure_train_may_send_fewer_messages_and_further_records",
        ),
        "aggregate_train": (
            YES,
            "called in every round with a list of replies. Call `super()` with all or some of "
            "them. The arrays you return are the next global model; None undoes the round",
            "test_aggregate_train_may_leave_replies_out_change_the_model_and_undo_a_round",
        ),
        "configure_evaluate": (
            YES,
            "called after every round once it or `aggregate_evaluate` is overridden; without an "
            "override clients are tested after the last round",
            "test_configure_evaluate_may_test_some_clients_in_some_rounds",
        ),
        "aggregate_evaluate": (
            YES,
            "as `configure_evaluate`; gets a list of replies",
            "test_hooks_that_only_look_change_no_bit",
        ),
        "summary": (YES, "called at the start", "test_hooks_that_only_look_change_no_bit"),
        "start": (
            YES,
            "call `super().start()`, or write a loop of your own around the other hooks. Such a "
            "loop has no retries, checkpoints or calibration",
            "test_a_start_of_ones_own_runs_every_method",
        ),
        "_construct_messages": (
            NO,
            "at construction: never called",
            "test_what_is_never_called_is_refused_by_name_at_construction",
        ),
        "_check_and_log_replies": (
            NO,
            "at construction: never called",
            "test_what_is_never_called_is_refused_by_name_at_construction",
        ),
    },
    "argument of `start`": {
        "grid": (YES, "", "test_hooks_that_only_look_change_no_bit"),
        "initial_arrays": (
            YES,
            "the `state_dict()` of the clients' network; a missing array is an error",
            "test_hooks_that_only_look_change_no_bit",
        ),
        "num_rounds": (YES, "", "test_hooks_that_only_look_change_no_bit"),
        "timeout": (
            YES,
            "for the replies of a round; a late client is a fault",
            "test_a_silent_client_is_reported_after_the_timeout",
        ),
        "train_config": (
            YES,
            "sent to the clients; keys of local training hold for the round (below)",
            "test_settings_in_train_config_are_those_of_local_training",
        ),
        "evaluate_config": (
            PART,
            "sent to the clients; a key of local training that differs is logged once",
            "test_what_cannot_be_honoured_is_said_once_with_both_values",
        ),
        "evaluate_fn": (
            YES,
            "gets one array for each of `initial_arrays`. What the method keeps on the clients has "
            "its initial value, and a warning names it. `Local`, which shares nothing, refuses",
            "test_evaluate_fn_gets_a_network_that_loads",
        ),
    },
    "argument of `FedAvg`": {
        "fraction_train": (
            YES,
            "drawn from `seed`, over clients; 0 is refused",
            "test_strategies_take_their_settings_by_name",
        ),
        "fraction_evaluate": (
            YES,
            "of the test; all clients save their personal models whatever it is "
            "(`keep_personal=False`: only those tested)",
            "test_all_clients_save_their_personal_models_whatever_share_is_tested",
        ),
        "min_train_nodes": (YES, "", "test_arguments_are_flowers"),
        "min_evaluate_nodes": (
            YES,
            "",
            "test_all_clients_save_their_personal_models_whatever_share_is_tested",
        ),
        "min_available_nodes": (
            PART,
            "before the first round; later rounds do not wait",
            "test_arguments_are_flowers",
        ),
        "weighted_by_key": (
            NO,
            'but for `"num-examples"`: a method defines its own weights',
            "test_what_mathematics_forbids_is_refused",
        ),
        "arrayrecord_key": (
            YES,
            'default `"broadcast"`',
            "test_records_have_the_names_one_gives_them",
        ),
        "configrecord_key": (YES, "", "test_records_have_the_names_one_gives_them"),
        "train_metrics_aggr_fn": (YES, "", "test_metric_callbacks_get_the_replies_metrics"),
        "evaluate_metrics_aggr_fn": (YES, "", "test_metric_callbacks_get_the_replies_metrics"),
    },
    "key of `train_config`": {
        **{
            name.replace("_", "-"): (
                YES,
                {"lr": "or `learning-rate`", "local_steps": "counts instead of epochs"}.get(
                    name, ""
                )
                or "a different value on the strategy is logged once; the config's is used",
                "test_settings_in_train_config_are_those_of_local_training",
            )
            for name in configs.HONOURED
        },
        "server-round": (
            PART,
            "added to your keys if there are any",
            "test_records_have_the_names_one_gives_them",
        ),
        "other settings of local training": (
            NO,
            "logged once with both values",
            "test_what_cannot_be_honoured_is_said_once_with_both_values",
        ),
    },
    "key of the run config": {
        name.replace("_", "-"): (
            YES,
            "with `run_config=context.run_config` on the strategy; without it, a different value "
            "is logged once by each client process",
            "test_the_apps_run_config_can_be_the_strategys",
        )
        for name in configs.RUN_CONFIG
    },
    "field of `Result`": {
        "arrays": (YES, "as `evaluate_fn`", "test_evaluate_fn_gets_a_network_that_loads"),
        "train_metrics_clientapp": (YES, "", "test_result_and_outcome_agree_with_the_run"),
        "evaluate_metrics_clientapp": (
            YES,
            "of the last round; of every round once an evaluation hook is overridden",
            "test_hooks_that_only_look_change_no_bit",
        ),
        "evaluate_metrics_serverapp": (
            YES,
            "",
            "test_evaluate_fn_sees_the_global_model_before_and_after_every_round",
        ),
    },
}


def methods_of(kind: type) -> set[str]:
    return {
        name for name, value in vars(kind).items() if callable(value) and name not in hooks.ORDINARY
    }


def arguments_of(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def table() -> str:
    lines = [MARKS[0], "", "| | | | |", "|---|---|---|---|"]
    for kind, rows in DECISIONS.items():
        lines += [
            f"| {kind} | `{name}` | {verdict} | {what} |"
            if " " not in name
            else f"| {kind} | {name} | {verdict} | {what} |"
            for name, (verdict, what, _) in rows.items()
        ]
    return "\n".join([*lines, "", MARKS[1]])


def test_every_hook_argument_and_result_of_flowers_is_decided():
    assert set(DECISIONS["hook"]) == methods_of(Strategy) | methods_of(FedAvg)
    assert set(DECISIONS["argument of `start`"]) == arguments_of(Strategy.start)
    assert arguments_of(Strategy.start) == arguments_of(strategies.FedMAP.start)
    assert set(DECISIONS["argument of `FedAvg`"]) == arguments_of(FedAvg.__init__)
    fields = {field.name for field in dataclasses.fields(Result)}
    assert set(DECISIONS["field of `Result`"]) == fields


def test_hooks_are_honoured_or_refused_as_the_table_says():
    honoured = {name for name, row in DECISIONS["hook"].items() if row[0] == YES}
    assert honoured == set(hooks.HONOURED)


def test_every_row_is_shown_by_a_test_that_exists():
    text = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    known = set(re.findall(r"^def (test_\w+)\(", text, re.MULTILINE))
    named = {row[2] for rows in DECISIONS.values() for row in rows.values()}
    assert named <= known, named - known


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), "run python tests/flower/test_faithful.py"


if __name__ == "__main__":
    page = PAGE.read_text()
    before, rest = page.split(MARKS[0])
    PAGE.write_text(before + table() + rest.split(MARKS[1])[1])
