"""From options to a run that may start: every check that needs no GPU, no process and no target.

`prepare_run` is a function of the options and the list of segments, so that the parent can refuse bad input in seconds
and each rank can repeat it to the same result.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_train.errors import InputError
from dflash_train.stage2_drafter.checkpoint import Checkpoint, read_groups
from dflash_train.stage2_drafter.config import TrainConfig
from dflash_train.stage2_drafter.drafter_config import DrafterConfig
from dflash_train.stage2_drafter.follow import Following
from dflash_train.stage2_drafter.initial_weights import initial_weights, read_initial_config
from dflash_train.stage2_drafter.rows import (
    HoldoutRows,
    RowSchedule,
    check_lengths,
    hash_place,
    split_holdout,
    split_samples,
)
from dflash_train.stage2_drafter.run_checkpoints import find_drafter, newest_checkpoint
from dflash_train.stage2_drafter.run_folder import Round, read_ledger, read_rounds
from dflash_train.store.joined import open_stores
from dflash_train.store.location import StoreLocation
from dflash_train.store.manifest import Manifest, StoreError
from dflash_train.store.mask_token import default_mask_token, mask_token_fault, mask_token_wanted
from dflash_train.store.plan import read_plan
from dflash_train.store.reader import StoreReader

DRAFTER_OPTIONS = {"num_hidden_layers": "--num-layers", "block_size": "--block-size", "mask_token_id": "--mask-token"}
"""Options that make an entry of the drafter's config."""
FOLLOWS_FROM_LAYERS = ("layer_types", "max_window_layers")


@dataclass(frozen=True, kw_only=True)
class CountedRows:
    """Rows of each epoch over these segments: counting takes 0.4 s a million samples and epoch, so one process tells all."""

    segments: list[str]
    epochs: list[int]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that fits its store."""

    config: TrainConfig
    reader: StoreReader
    drafter_config: DrafterConfig
    schedule: RowSchedule
    holdout: HoldoutRows
    total_steps: int
    num_training: int
    """Samples trained on; the rest is held out, or left out by --fraction."""
    following: Following | None = None
    """Where the store grows: what schedule, held-out rows and total_steps follow from."""

    def counted(self) -> CountedRows:
        """What the processes that this one starts need not count again."""
        return CountedRows(segments=list(self.reader.segment_ids), epochs=self.schedule.counted())

    def held_out(self) -> np.ndarray:
        """Which samples of the store (bool [N]) are held out; of one that grows, by the hash of their group alone."""
        groups = np.asarray(self.reader.samples["group"], dtype=np.int64)
        share = self.config.holdout
        return split_holdout(groups, share) if self.following is None else hash_place(groups) < share

    def training_groups(self) -> np.ndarray:
        """Groups (int64, ascending, each once) of all that is not held out: no prompt of these is evaluated on.

        Those that the drafter of --init-from was trained on are among them, as far as it lists them.
        """
        own = np.asarray(self.reader.samples["group"], dtype=np.int64)[~self.held_out()]
        start = self.config.init_from
        before, resumed = None, None if start is None else newest_checkpoint(self.config.run)
        if resumed is not None:  # its list has those of the first drafter, whose folder is needed no more
            before = read_groups(resumed.path)
        elif start is not None and start.is_dir():
            before = read_groups(find_drafter(start))
        return np.unique(own) if before is None else np.union1d(own, before)


def prepare_run(
    config: TrainConfig,
    segments: Sequence[str] | None = None,
    rounds: Sequence[Round] = (),
    first_row: int = 0,
    counted: CountedRows | None = None,
) -> PreparedRun:
    """Open the store and check the options against it; raises InputError with the first thing that does not fit.

    segments is the run's ledger; None takes all that the store has. Under --follow the ledger is `rounds`, of which the
    rows before first_row are done, and segments are those to open. `counted` holds where it is of the same segments.
    """
    if config.follow:
        return _prepare_following(config, segments or (), rounds, first_row)
    reader = open_stores((config.store, *config.more_stores), segments, config.direct_io)
    if not len(reader.samples):
        raise InputError(f"{config.store} holds no sample yet. Run `dflash extract` first.")
    drafter_config = make_drafter_config(config, reader)
    lengths = check_lengths(np.asarray(reader.samples["length"]), config.row_tokens, config.crop)
    ids, groups = np.asarray(reader.samples["id"]), np.asarray(reader.samples["group"])
    training, held_out = split_samples(ids, groups, config.holdout, config.fraction)
    if not len(training) and config.fraction < 1:
        raise InputError(
            f"--fraction {config.fraction} leaves none of the {len(lengths)} samples of {config.store} to train on. "
            "Give a larger one."
        )
    schedule = RowSchedule(
        lengths,
        training,
        seed=config.seed,
        row_tokens=config.row_tokens,
        epochs=config.num_epochs,
        counted=counted.epochs if counted is not None and counted.segments == reader.segment_ids else (),
    )
    holdout = HoldoutRows(lengths, held_out, seed=config.seed, row_tokens=config.row_tokens, limit=config.evaluate_rows)
    total_steps = config.steps if config.steps is not None else -(-schedule.num_rows() // config.rows_per_step)
    return PreparedRun(
        config=config,
        reader=reader,
        drafter_config=drafter_config,
        schedule=schedule,
        holdout=holdout,
        total_steps=total_steps,
        num_training=len(training),
    )


def _prepare_following(
    config: TrainConfig, segments: Sequence[str], rounds: Sequence[Round], first_row: int
) -> PreparedRun:
    reader = StoreReader(config.store, segments, direct_io=config.direct_io)
    plan = read_plan(config.store_folder)
    if plan is not None:  # what has not come yet is refused now as well
        check_lengths(np.array([plan.longest]), config.row_tokens, config.crop)
    drafter_config = make_drafter_config(config, reader)
    following = Following(config, reader, rounds, first_row)
    return PreparedRun(
        config=config,
        reader=reader,
        drafter_config=drafter_config,
        schedule=following.schedule,
        holdout=following.holdout,
        total_steps=following.length(len(rounds)),
        num_training=0,
        following=following,
    )


def prepare_ahead(config: TrainConfig, counted: CountedRows | None = None) -> PreparedRun:
    """`prepare_run` for who knows only the run folder: a parent, which reads no row, or a first rank, which decides.

    A new run takes the segments of `counted`, else all that the store has.
    """
    if config.follow:
        return prepare_run(config, (), read_rounds(config.run), sys.maxsize)
    segments = planned_segments(config.run)
    if segments is None and counted is not None:
        segments = counted.segments
    return prepare_run(config, segments, counted=counted)


def planned_segments(run: Path) -> list[str] | None:
    """The segment ids that a run trains on: its ledger's, else its newest checkpoint's, None for a new run."""
    segments = read_ledger(run)
    if segments is None and (checkpoint := newest_checkpoint(run)) is not None:
        return checkpoint.state().segments
    return segments


def check_resume(run: PreparedRun) -> Checkpoint | None:
    """The checkpoint that the run goes on from; raises InputError naming every option or store field that changed."""
    checkpoint = newest_checkpoint(run.config.run)
    if checkpoint is None:
        return None
    state = checkpoint.state()
    differences = run.config.changes(state.config)
    differences += Manifest.from_json(state.store).differences(run.reader.manifest)
    if run.following is not None:
        if state.rounds > len(run.following.rounds):
            differences.append(
                f"the ledger has {len(run.following.rounds)} rounds, the checkpoint {state.rounds} (restore "
                f"{run.config.run / 'ledger.jsonl'} from a copy)"
            )
    elif state.segments != run.reader.segment_ids:
        differences.append(
            f"the ledger lists {len(run.reader.segment_ids)} segments, the checkpoint {len(state.segments)}, and not the "
            f"same (delete {run.config.run / 'ledger.jsonl'} to take the checkpoint's)"
        )
    differences += _drafter_differences(run.config, _flat(run.drafter_config.to_json()), _flat(state.drafter))
    if differences:
        raise InputError(
            f"{checkpoint.path} cannot be resumed with these options: {'; '.join(differences)}. "
            "Give the options the run began with, or another --run folder."
        )
    return checkpoint


def _drafter_differences(config: TrainConfig, now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """What differs between two drafters: by option where options made them, and then without what follows from these."""
    differing = [name for name, value in then.items() if now.get(name) != value]
    options = DRAFTER_OPTIONS if config.drafter_config is None and config.init_from is None else {}
    if "num_hidden_layers" in differing and "num_hidden_layers" in options:
        differing = [name for name in differing if name not in FOLLOWS_FROM_LAYERS]
    return [
        f"{options.get(name, f'{name} of the drafter')} is {now.get(name)}, the checkpoint has {then[name]}"
        for name in differing
    ]


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A drafter's config with the entries of its inner tables beside the others."""
    inner = {name: value for table in config.values() if isinstance(table, dict) for name, value in table.items()}
    return inner | {name: value for name, value in config.items() if not isinstance(value, dict)}


def make_drafter_config(config: TrainConfig, reader: StoreReader) -> DrafterConfig:
    """The drafter of this run: from --init-from or --drafter-config, checked against the store, else like the target."""
    manifest = reader.manifest
    if config.init_from is not None:
        return _initial_drafter_config(config, config.init_from, reader)
    if config.drafter_config is None:
        return DrafterConfig.from_target(
            reader.target_config(),
            manifest=manifest,
            num_layers=config.num_layers,
            block_size=config.block_size,
            mask_token_id=resolve_mask_token(config.mask_token, manifest.vocab_size, reader.tokenizer_path),
        )
    path = config.drafter_config
    try:
        drafter_config = DrafterConfig.from_json(json.loads(path.read_text()))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"--drafter-config {path} cannot be read: {error}. Give a drafter's config.json in z-lab's format."
        ) from error
    return _fitted(drafter_config, config, reader, path)


def _initial_drafter_config(config: TrainConfig, path: Path, reader: StoreReader) -> DrafterConfig:
    """The config of the drafter that the run starts from, or started from: a checkpoint no longer needs its folder."""
    checkpoint = newest_checkpoint(config.run)
    if checkpoint is not None:
        return _fitted(DrafterConfig.from_json(checkpoint.state().drafter), config, reader, checkpoint.path)
    return _fitted(read_initial_config(path), config, reader, path)


def _fitted(drafter_config: DrafterConfig, config: TrainConfig, reader: StoreReader, source: Path) -> DrafterConfig:
    """A drafter config that was read, with the mask token that was asked for, checked against the store."""
    if config.mask_token is not None:
        mask_token_id = resolve_mask_token(config.mask_token, reader.manifest.vocab_size, reader.tokenizer_path)
        drafter_config = dataclasses.replace(drafter_config, mask_token_id=mask_token_id)
    check_drafter(drafter_config, reader.manifest, config.store, source)
    return drafter_config


def check_initial_weights(run: PreparedRun) -> None:
    """Refuse weights to start from that are not finite or that the store's projection would change too much, and a list
    of their training data that cannot be read: before anything is trained, not at the first checkpoint."""
    if run.config.init_from is not None:
        initial_weights(run.config.init_from, run.reader.encoding, run.reader.calibration)
        run.training_groups()


def check_mask_token(run: PreparedRun) -> None:
    """Refuse the mask token that was chosen where `dflash check` would refuse the trained drafter for it.

    A drafter that goes on from another's weights keeps the token that these were trained with. Where the store's tokenizer
    cannot be loaded nothing is checked: training does not need it.
    """
    config, token = run.config, run.drafter_config.mask_token_id
    if config.init_from is not None and config.mask_token is None:
        return
    try:
        tokenizer, target = _load_tokenizer(run.reader.tokenizer_path), run.reader.target_config()
    except Exception:  # noqa: BLE001 - whatever a damaged file makes of a foreign loader
        return
    fault = mask_token_fault(token, tokenizer, target.get("text_config") or target)
    if fault is None:
        return
    if config.mask_token is not None:
        chosen = f"--mask-token {config.mask_token if str(config.mask_token).isdecimal() else repr(config.mask_token)}"
    else:
        chosen = "The tokenizer's own" if config.drafter_config is None else f"That of {config.drafter_config}"
    default = default_mask_token(tokenizer, run.drafter_config.vocab_size)
    wanted = f": {mask_token_wanted(tokenizer)}" if default in (None, token) else f" {default}"
    raise InputError(f"{chosen} cannot be the mask token: {fault}. Give --mask-token{wanted}.")


def check_drafter(drafter_config: DrafterConfig, manifest: Manifest, store: StoreLocation, source: Path) -> None:
    """Refuse a drafter made for other features than the store holds, naming both sides of every difference."""
    store_values: dict[str, Any] = {
        "target_layer_ids": list(manifest.target_layer_ids),
        "num_target_layers": manifest.num_target_layers,
        "hidden_size": manifest.hidden_size,
        "vocab_size": manifest.vocab_size,
        "input_embedding_scale": manifest.embedding_scale,
        "output_multiplier": manifest.logit_scale,
        "final_logit_softcapping": manifest.logit_softcap,
    }
    differences = []
    for name, stored in store_values.items():
        wanted = getattr(drafter_config, name)
        wanted = list(wanted) if isinstance(wanted, tuple) else wanted
        if wanted != stored:
            differences.append(f"{name} of the store is {stored} but the drafter config has {wanted}")
    if differences:
        raise InputError(
            f"{source} does not fit {store}: {'; '.join(differences)}. "
            "Extract again with this target and these layers, or give another drafter."
        )


def resolve_mask_token(mask_token: int | str | None, vocab_size: int, tokenizer_path: Callable[[], Path]) -> int:
    """The id whose embedding row fills the block's open slots: an existing row that no text is tokenised to.

    The id or text given, else `default_mask_token`. An id needs no tokenizer: its files may be damaged.
    """
    if isinstance(mask_token, str) and mask_token.isdecimal():
        mask_token = int(mask_token)
    if isinstance(mask_token, int):
        if not 0 <= mask_token < vocab_size:
            raise InputError(
                f"--mask-token {mask_token} is no row of the embedding, which has {vocab_size} rows. "
                f"Give an id from 0 to {vocab_size - 1} that the tokenizer does not use."
            )
        return mask_token
    tokenizer = _load_tokenizer(tokenizer_path)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if mask_token is not None:
        if mask_token not in vocabulary:
            raise InputError(
                f"--mask-token {mask_token!r} is no token of the store's tokenizer. Give the text of one token, or an "
                f"id below {vocab_size}."
            )
        return vocabulary[mask_token]
    default = default_mask_token(tokenizer, vocab_size)
    if default is None:
        raise InputError(
            f"The tokenizer has no mask token and uses all {vocab_size:,} rows of the embedding. Give --mask-token: "
            f"{mask_token_wanted(tokenizer)}."
        )
    return default


def _load_tokenizer(path: Callable[[], Path]) -> Any:
    from transformers import AutoTokenizer

    way_out = "Give --mask-token with the id of an unused row of the embedding."
    try:
        folder = path()
    except StoreError as error:
        raise InputError(f"{error} {way_out}") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"The store's tokenizer in {folder} cannot be loaded ({error}). {way_out}") from error
