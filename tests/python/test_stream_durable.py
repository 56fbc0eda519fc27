"""Durable models: a script that was killed goes on, started again, with the bits of one that was not."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_bytes
from streaming import BUILD, LR, batches, make, masters, roomy, tierflow, torch, transformers

STEPS = 5
KILLS = int(os.environ.get("TIERFLOW_KILLS", "0"))  # more of them than in the ordinary run
DROPOUT = dict(vocab_size=160, n_embd=64, n_layer=3, n_head=4, n_positions=64, initializer_range=0.08, bos_token_id=1, eos_token_id=2, resid_pdrop=0.1,
               embd_pdrop=0.1, attn_pdrop=0.0)  # fmt: skip
SMALL, LARGE = {"device": "600KiB", "host": "1MiB"}, {"device": "64MiB", "host": "64MiB"}


def plan_of(folders, durable=True, size=SMALL, **options):
    """Budgets far below the state, with delays and poison on the device; or so large that all of it is resident."""
    budget = tierflow.Budget(**size, storage=folders, activations=0.0, durable=durable)
    extra = {"chaos_seed": 5, "chunk_elements": 65536} if size == SMALL else {}
    return tierflow.Plan(budget, allow_any_filesystem=True, **{"precision": "fp32-master+adam32", "extra": extra, **options})


def gpt2(**changes):
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**DROPOUT, **changes})).bfloat16().train()


def kill_me(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def train(plan, kill_at=None, kill_in=None, adapters=False, trainer=False, drops_commit=None, worker=None, close=True):
    """A script with dropout, clipping and a schedule: (first step, losses, last learning rate, trained weights). Killed in step kill_at, if asked for."""
    torch.set_num_threads(1)
    model = tierflow.wrap(make("llama").requires_grad_(False) if adapters else gpt2(), plan)
    torch.manual_seed(4)
    if adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = tierflow.optim.AdamW(trained, lr=LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS + 3)
    done = tierflow.resume(model, opt, schedule) if plan.budget.durable else 0
    if drops_commit:
        opt.journal.begin_commit = lambda: None
    data = batches("llama" if adapters else "gpt2", 2 * STEPS)
    layer_major = tierflow.Trainer(model, opt) if trainer else None
    losses = []
    for step in range(done, STEPS):
        now = {kill_in: step == kill_at}
        rows = data[2 * step : 2 * step + 2]
        if layer_major is not None:
            losses.append(layer_major.step(rows).loss)
        else:
            parts = []
            for batch in rows:
                parts.append(model(**batch).loss / 2)
                if now.get("forward"):
                    kill_me()
                parts[-1].backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            opt.step()
            losses.append(sum(part.item() for part in parts))
        if now.get("step"):
            if worker is not None and os.fork() == 0:
                pathlib.Path(f"{worker}.new").write_text(str(os.getpid()))
                os.rename(f"{worker}.new", worker)
                time.sleep(600)
            while worker is not None and not os.path.exists(worker):
                time.sleep(0.01)
            kill_me()
        schedule.step()
        opt.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad} if adapters else masters(model)
    if close:
        tierflow.close(model)
    return done, losses, opt.param_groups[0]["lr"], weights


def serve():
    """Each line of input is a run, which a fork of this process makes; the answer is the status it ended with."""
    import peft

    with torch.no_grad():  # what is imported late is imported once
        model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
        model(**batches("llama", 1)[0])
        gpt2()(**batches("gpt2", 1)[0])
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    opt = tierflow.optim.AdamW([weight])
    torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    opt.step()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.update(job["environment"])
            plan = plan_of(job["folders"], job["durable"], trainable=not job["run"].get("adapters"), size=SMALL if job["small"] else LARGE)
            done, losses, rate, weights = train(plan, **job["run"])
            save_file(weights, job["out"], {"run": json.dumps([done, losses, rate])})
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Runs train() in a process of its own that imported everything once."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_stream_durable as t; t.serve()"
    environment = {**os.environ, "LD_PRELOAD": str(BUILD / "librecord_calls.so")}
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    out = tmp_path_factory.mktemp("out") / "weights"

    def run(*folders, durable=True, small=True, kill_call="", fail_call="", calls="", **how):
        # kill_call: OPERATION:END_OF_PATH:NTH, before that call. fail_call: OPERATION:END_OF_PATH:ERRNO, the first such call.
        # calls: a file that gets a line for each.
        call, _, nth = kill_call.rpartition(":")
        job = {"folders": [str(folder) for folder in folders], "durable": durable, "small": small, "run": how, "out": str(out),
               "environment": {"TIERFLOW_FAIL": f"{call}:kill", "TIERFLOW_FAIL_NTH": nth} if call else {"TIERFLOW_FAIL": fail_call, "TIERFLOW_FAIL_NTH": "1"} if fail_call else {}}  # fmt: skip
        if calls:
            job["environment"]["TIERFLOW_CALLS"] = str(calls)
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        if how.get("kill_in") or call:
            assert status == signal.SIGKILL
            return None
        assert status == 0
        from safetensors import safe_open

        with safe_open(out, "pt") as file:
            return (*json.loads(file.metadata()["run"]), load_file(out))

    yield run
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.fixture(scope="module")
def whole(script):
    return {
        "loop": script(durable=False, small=False),
        "trainer": script(durable=False, small=False, trainer=True),
        "adapters": script(durable=False, small=False, adapters=True),
    }


def same(run, expected):
    done, losses, rate, weights = run
    equal = losses == expected[1][done:] and rate == expected[2] and weights.keys() == expected[3].keys()
    return equal and all(torch.equal(weight, expected[3][name]) for name, weight in weights.items())


def test_killed_at_several_steps_it_goes_on_to_the_bit(script, whole, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for at, where in ((0, "step"), (1, "forward"), (3, "step"))[0 if KILLS else 1 :]:
        script(a, b, kill_at=at, kill_in=where)
        assert (a / "state.tfv").exists() and (b / "state.tfv").exists()
    run = script(b, a, small=False)  # other budgets, the folders in another order
    assert run[0] == 3 and same(run, whole["loop"])
    run = script(a, b)  # finished: nothing is done again
    assert run[0] == STEPS and same(run, whole["loop"])


@pytest.mark.parametrize(("call", "goes_on"), [("rename:state.tfv.beside.B.partial:2", 1), ("flush:/lone:7", 2)])
def test_killed_in_a_commit_it_goes_on_to_the_bit(call, goes_on, script, whole, tmp_path):
    """Before what lies beside a generation has its name, and when it has it and the commit is to come."""
    script(tmp_path / "lone", kill_call=call)
    run = script(tmp_path / "lone")
    assert run[0] == goes_on and same(run, whole["loop"])


def test_without_the_commit_it_would_be_noticed(script, whole, tmp_path):
    """The negative control: a run that commits nothing after its beginning goes on from there."""
    script(tmp_path, kill_at=3, kill_in="forward", drops_commit=True)
    assert script(tmp_path)[0] == 0


@pytest.mark.parametrize("how", ["trainer", "adapters"])
def test_the_layer_major_step_and_adapters_go_on_too(how, script, whole, tmp_path):
    script(tmp_path, kill_at=3, kill_in="step", **{how: True})
    run = script(tmp_path, **{how: True})
    assert run[0] == 3 and same(run, whole[how])


def test_every_other_step_and_the_last_when_it_is_closed(script, whole, tmp_path):
    script(tmp_path, durable=2, kill_at=3, kill_in="step")
    run = script(tmp_path, durable=2)
    assert run[0] == 2 and same(run, whole["loop"])
    assert script(tmp_path)[0] == STEPS


def test_what_the_loop_changes_after_a_step_is_not_committed_with_it(tmp_path):
    def begin():
        model = tierflow.wrap(make("llama").requires_grad_(False), plan_of([tmp_path], 3, size=LARGE, trainable=False))
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)).train()
        model.register_buffer("counted", torch.zeros(1))
        model.register_forward_hook(lambda *_: model.counted.add_(1) and None)
        opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        return model, opt, tierflow.resume(model, opt)

    model, opt, _ = begin()
    for batch in batches("llama", 4):  # a commit is due after the third
        model(**batch).loss.backward()
        opt.step()
        opt.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    left = torch.get_rng_state()
    model(**batches("llama", 1)[0]).loss.backward()  # a step that is broken off
    for p in opt.param_groups[0]["params"]:
        p.data += 1  # as weights of an average are put in for an evaluation
    tierflow.close(model)
    assert not torch.equal(torch.get_rng_state(), left)
    model, opt, done = begin()
    assert done == 4 and model.counted.item() == 4 and torch.equal(torch.get_rng_state(), left)
    assert weights and all(torch.equal(p, weights[name]) for name, p in model.named_parameters() if p.requires_grad)
    tierflow.close(model, discard=True)


@pytest.fixture
def made(tmp_path):
    """A durable model after two steps, the second of them not committed yet, and what makes it again."""
    opened = []

    def begin(model=None, plan=None, schedules=1, resumes=True, rate=LR, steps=STEPS, folders=(tmp_path / "a",), **settings):
        model = tierflow.wrap(model or gpt2(), plan or plan_of(list(folders), size=LARGE))
        opened.append(model)
        opt = tierflow.optim.AdamW(model.parameters(), lr=rate, **settings)
        made = [torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, steps) for _ in range(schedules)]
        return model, opt, *((tierflow.resume(model, opt, *made),) if resumes else ())

    begin.opened = opened
    model, opt, done = begin()
    assert done == 0
    for batch in batches("gpt2", 2):
        model(**batch).loss.backward()
        opt.step()
        opt.zero_grad()
    yield model, opt, begin
    for model in opened:
        if not isinstance(tierflow.model.engine_of(model).native, tierflow.engine._Gone):
            tierflow.close(model, discard=True)


def scheduled(tmp_path, make_schedules, done=None, rate=LR, data="", trains=0):
    """Steps of a durable model whose gradients are zero: the learning rate after each of them. done: what resume() has to say."""
    model = tierflow.wrap(gpt2(n_layer=1), plan_of([tmp_path / "s"], size=LARGE))
    try:
        opt = tierflow.optim.AdamW(model.parameters(), lr=rate)
        schedules = make_schedules(opt)
        assert tierflow.resume(model, opt, *schedules, data=data) == (done or 0)
        rates = [opt.param_groups[0]["lr"]]
        for batch in batches("gpt2", trains):
            model(**batch).loss.backward()
            opt.step()
            opt.zero_grad()
            for schedule in schedules:
                schedule.step()
            rates.append(opt.param_groups[0]["lr"])
        return rates
    finally:
        tierflow.close(model)


def rates_of(make_schedules, rate, steps):
    opt = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedules = make_schedules(opt)
    rates = [opt.param_groups[0]["lr"]]
    for _ in range(steps):
        opt.step()
        for schedule in schedules:
            schedule.step()
        rates.append(opt.param_groups[0]["lr"])
    return rates


def test_learning_rate_and_schedule_are_those_given_again(tmp_path):
    of = torch.optim.lr_scheduler

    def linear(total):
        return lambda opt: [of.LinearLR(opt, 1.0, 0.1, total)]

    def warm_cosine(opt):
        return [of.SequentialLR(opt, [of.LinearLR(opt, 0.1, 1.0, 2), of.CosineAnnealingLR(opt, 9)], [2])]

    assert scheduled(tmp_path, linear(5), trains=3) == rates_of(linear(5), LR, 3)
    # Each of them from where the run is, to the bit of a run that had it from the beginning.
    assert scheduled(tmp_path, linear(5), done=3, trains=1) == rates_of(linear(5), LR, 4)[3:]
    assert scheduled(tmp_path, linear(9), done=4, rate=2e-3, trains=1) == rates_of(linear(9), 2e-3, 5)[4:]
    assert scheduled(tmp_path, warm_cosine, done=5, trains=1) == rates_of(warm_cosine, LR, 6)[5:]
    made = []
    with pytest.raises(tierflow.UsageError, match="the OneCycleLR ends before step 6, where the run is"):
        scheduled(tmp_path, lambda opt: [made.append(of.OneCycleLR(opt, 5e-3, 4, cycle_momentum=False)) or made[0]])
    assert made[0].last_epoch == 0 and made[0].optimizer.param_groups[0]["lr"] == made[0].get_last_lr()[0] == pytest.approx(5e-3 / 25)
    with pytest.raises(tierflow.UsageError, match="a ReduceLROnPlateau does not go by steps alone"):
        scheduled(tmp_path, lambda opt: [of.ReduceLROnPlateau(opt)])
    whole = lambda opt: [of.OneCycleLR(opt, 5e-3, 20)]  # noqa: E731 (which moves betas too)
    assert scheduled(tmp_path, whole, done=6) == rates_of(whole, LR, 6)[6:]
    # What was refused changed nothing.
    assert scheduled(tmp_path, warm_cosine, done=6) == rates_of(warm_cosine, LR, 6)[6:]


def test_a_new_rate_of_one_group_leaves_what_the_loop_gave_another(tmp_path):
    def begin(first):
        model = tierflow.wrap(gpt2(n_layer=1), plan_of([tmp_path / "s"], size=LARGE))
        one, *others = model.parameters()
        opt = tierflow.optim.AdamW([{"params": [one], "lr": first}, {"params": others, "lr": 1e-2}])
        return model, opt, tierflow.resume(model, opt)

    model, opt, _ = begin(1e-3)
    for batch, rate in zip(batches("gpt2", 2), (1e-2, 7e-5), strict=True):
        model(**batch).loss.backward()
        opt.param_groups[1]["lr"] = rate
        opt.step()
        opt.zero_grad()
    tierflow.close(model)
    model, opt, done = begin(2e-3)
    try:
        assert done == 2 and [group["lr"] for group in opt.param_groups] == [2e-3, 7e-5]
    finally:
        tierflow.close(model, discard=True)


def test_what_lies_beside_the_state_is_pinned_and_opens(tmp_path):
    """golden/beside.json has the header and the record of state.tfv.beside.*: this version writes the same, and goes on with what it says."""

    def made(folder):
        model = tierflow.wrap(gpt2(n_layer=1), plan_of([folder], size=LARGE))
        model.register_parameter("own", torch.nn.Parameter(torch.zeros(3)))  # which does not stream
        return model, tierflow.optim.AdamW(model.parameters(), lr=LR)

    model, opt = made(tmp_path / "s")
    tierflow.resume(model, opt, data="rows.jsonl")
    (model(**batches("gpt2", 1)[0]).loss + model.own.sum()).backward()
    opt.step()
    tierflow.close(model)
    (newest,) = (tmp_path / "s").glob("state.tfv.beside.A")  # of the second generation: after the step
    beside = newest.read_bytes()
    header = json.loads(beside[8 : 8 + int.from_bytes(beside[:8], "little")])
    metadata = header.pop("__metadata__")
    record, result = json.loads(metadata["record"]), json.loads(metadata["result"])
    result["files"] = {name: "" for name in result["files"]}  # transformers' own text
    written = {"tensors": {name: [of["dtype"], of["shape"]] for name, of in header.items()}, "record": record, "result": result}
    file = pathlib.Path(__file__).parent / "golden" / "beside.json"
    if "TIERFLOW_WRITE_GOLDEN" in os.environ:
        file.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    golden = json.loads(file.read_text())
    assert written == golden
    older = json.loads(json.dumps(golden["record"]))
    del older["made"]["data"]
    tensors = {name: torch.zeros(shape, dtype={"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}[kind]) for name, (kind, shape) in golden["tensors"].items()}
    model, opt = made(tmp_path / "new")
    earlier = {name: tensor for name, tensor in tensors.items() if not name.startswith(("random.python", "random.numpy"))}
    for step, (of, beside) in enumerate(((golden["record"], {**tensors, **tierflow.checkpoint.random_states()}), (older, earlier)), 7):
        journal = tierflow.durable.Journal(model, opt, [], "rows.jsonl")
        journal.put_back(step, save_bytes({**beside, "random.cpu": torch.get_rng_state()}, {"record": json.dumps(of)}))
        assert journal.step == step
    tierflow.close(model)


def test_other_data_is_refused_by_name(tmp_path):
    def none(opt):
        return []

    with pytest.raises(tierflow.UsageError, match="a text that names the data, or tierflow.data.Rows, not a list"):
        scheduled(tmp_path, none, data=["rows.jsonl"])
    scheduled(tmp_path, none, data="rows.jsonl sha 12", trains=1)
    for other in "rows.jsonl sha 13", "":
        with pytest.raises(tierflow.UsageError, match=f"begun with data='rows.jsonl sha 12', not '{other}'"):
            scheduled(tmp_path, none, data=other)
    # Without a scheduler: the learning rate that is given, and else the one that the loop left.
    assert scheduled(tmp_path, none, done=1, rate=3e-3, data="rows.jsonl sha 12", trains=1) == [3e-3, 3e-3]


def test_adapters_do_not_go_on_over_a_base_with_other_weights(tmp_path):
    """Nor over another folder; what is trained may begin with other values, which the state replaces."""
    folder, plan = tmp_path / "model", plan_of([tmp_path / "a"])
    train(plan, adapters=True)
    other = make("llama").requires_grad_(False)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight += 0.01
    with pytest.raises(tierflow.UsageError, match="the run whose state is here had another model's weights: the same script"):
        tierflow.wrap(other, plan)
    tierflow.close(tierflow.wrap(make("llama").requires_grad_(False), plan))
    make("llama").save_pretrained(folder)
    from_folder = plan_of([tmp_path / "b"])
    model = tierflow.load(folder, from_folder)
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    tierflow.resume(model, opt)
    tierflow.close(model)
    other.save_pretrained(folder)
    with pytest.raises(tierflow.UsageError, match="another model's weights"):
        tierflow.load(folder, from_folder)
    tierflow.close(tierflow.wrap(gpt2(), plan_of([tmp_path / "c"])))
    random = gpt2()
    with torch.no_grad():
        random.lm_head.weight += 0.01
    tierflow.close(tierflow.wrap(random, plan_of([tmp_path / "c"])))


def test_what_is_not_the_same_run_is_refused_and_the_state_stays(made, tmp_path):
    model, _, begin = made
    with pytest.raises(tierflow.LockedError, match="this process holds it"):
        begin()
    tierflow.close(model)
    a = tmp_path / "a"
    for text, how in {
        r"another configuration: the same script .* remove .*state.tfv\*": {"model": gpt2(resid_pdrop=0.2)},
        "another model": {"model": gpt2(n_layer=2)},
        "another precision": {"plan": plan_of([a], precision="bf16-sr+adam8")},
        "another seed": {"plan": plan_of([a], seed=1)},
    }.items():
        with pytest.raises(tierflow.Error, match=text) as refused:
            begin(**how)
        assert "\n" not in str(refused.value)
    for text, how in {
        "weight_decay=0.0 in the optimizer's group 0, not 0.1": {"weight_decay": 0.1},
        "or another number of these": {"schedules": 2},
    }.items():
        with pytest.raises(tierflow.UsageError, match=text):
            begin(**how)
        tierflow.close(begin.opened[-1])
    assert begin()[2] == 2


def tierflow_program(*arguments):
    done = subprocess.run([BUILD / "tierflow", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr.strip()


def spoil(path):
    held = path.read_bytes()
    path.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))


def test_a_damaged_state_is_refused(made, tmp_path):
    model, _, begin = made
    tierflow.close(model)
    a = tmp_path / "a"
    for letter in "AB":
        spoil(a / f"state.tfv.beside.{letter}")
    with pytest.raises(tierflow.CorruptionError, match=r"generation 3: .*beside.B: is missing or is not what was written .*generation 2, .*beside.A"):
        begin()
    code, _, err = tierflow_program("verify", a)
    assert code == 6 and "beside.B" in err and "generation 2 is not whole either" in err and "\n" not in err
    for letter in "AB":
        spoil(a / f"state.tfv.beside.{letter}")
    assert tierflow_program("verify", a)[0] == 0
    state = tmp_path / "a" / "state.tfv"
    with open(state, "r+b") as file:
        for at in range(4 << 20, state.stat().st_size, 1 << 16):
            file.seek(at)
            file.write(b"damage")
    with pytest.raises(tierflow.CorruptionError, match="What is left is what was exported before"):
        begin()


def test_where_what_lies_beside_the_newest_is_damaged_the_one_before_counts(script, whole, made, tmp_path, caplog):
    model, _, begin = made
    tierflow.close(model)
    (tmp_path / "a" / "state.tfv.beside.B").unlink()
    code, _, err = tierflow_program("verify", tmp_path / "a")
    assert code == 6 and "generation 3: is missing" in err and "generation 2, the one before it, is whole: a run goes on from there" in err
    assert begin()[2] == 1
    assert "generation 3 of the state" in caplog.text and "goes on from generation 2, which is whole, after step 1" in caplog.text
    # To the bit, unless the run had begun to overwrite it.
    def spoilt(folder, where):
        script(tmp_path / folder, kill_at=3, kill_in=where)
        spoil(max((tmp_path / folder).glob("state.tfv.beside.*"), key=lambda path: path.stat().st_mtime_ns))
        return tierflow_program("verify", tmp_path / folder)[2]

    for _ in range(5):  # on a crowded machine it may have begun
        if "is not whole either" not in spoilt("b", "step"):
            break
        shutil.rmtree(tmp_path / "b")
    spoilt("c", "forward")
    run = script(tmp_path / "b")
    assert run[0] == 2 and same(run, whole["loop"])
    with pytest.raises(tierflow.CorruptionError, match="beside.*begun to overwrite it"):
        tierflow.wrap(gpt2(), plan_of([tmp_path / "c"]))
    assert "is not whole either" in tierflow_program("verify", tmp_path / "c")[2]


def test_misuse_is_said(made, tmp_path):
    model, opt, begin = made
    with pytest.raises(tierflow.UsageError, match="resume.. was called before"):
        tierflow.resume(model, opt)
    with pytest.raises(tierflow.UsageError, match="goes on with its own state"):
        tierflow.load_checkpoint(model, opt, tmp_path / "checkpoint")
    torch.optim.lr_scheduler.StepLR(other := begin(folders=[tmp_path / "b"], schedules=0)[1], 2)
    other.step()
    with pytest.raises(tierflow.UsageError, match="make it before tierflow.resume"):
        other.step()
    _, unsaid = begin(folders=[tmp_path / "c"], resumes=False)
    with pytest.raises(tierflow.UsageError, match="call done = tierflow.resume"):
        unsaid.step()
    plain = tierflow.wrap(gpt2(), roomy())
    with pytest.raises(tierflow.UsageError, match="the model is not durable"):
        tierflow.resume(plain, tierflow.optim.AdamW(plain.parameters()))
    with pytest.raises(tierflow.UsageError, match="takes storage"):
        tierflow.Budget(device=1, host=1, durable=True)


def test_what_is_written_before_resume_does_not_take_the_place_of_the_state(made):
    model, _, begin = made
    expected = masters(model)
    tierflow.close(model)
    again, opt, *_ = begin(resumes=False)
    weight = next(p for p in again.parameters() if p.requires_grad)
    with pytest.raises(tierflow.UsageError, match="was written before tierflow.resume"):
        torch.nn.init.normal_(weight)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS)
    assert tierflow.resume(again, opt, schedule) == 2
    assert all(torch.equal(value, expected[name]) for name, value in masters(again).items())


def test_what_does_not_train_is_written_before_the_first_commit_alone(made, tmp_path):
    _, _, begin = made

    def adapted(size, folder, value=None):
        import peft

        model = tierflow.wrap(make("llama").requires_grad_(False), plan_of([tmp_path / folder], size=size, trainable=False))
        begin.opened.append(model)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
        base = model.get_base_model().model.norm.weight
        if value is not None:
            with torch.no_grad():
                base.fill_(value)
        opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        tierflow.resume(model, opt)
        return model, opt, base

    for size, folder in ((SMALL, "small"), (LARGE, "large")):
        model, opt, base = adapted(size, folder, value=0.5)
        with pytest.raises(tierflow.UsageError, match="does not train, and is committed once"):
            model.merge_and_unload()
        model(**batches("llama", 1)[0]).loss.backward()  # nothing was harmed
        opt.step()
        tierflow.close(model)
        _, opt, base = adapted(size, folder)
        assert torch.equal(base.detach().float().cpu(), torch.full(base.shape, 0.5)) and opt.journal.step == 1


def test_the_one_optimizer_has_all_that_trains(made, tmp_path):
    _, _, begin = made
    model, opt = begin(folders=[tmp_path / "one"], resumes=False, schedules=0)
    with pytest.raises(tierflow.UsageError, match="before the first backward"):
        model(**batches("gpt2", 1)[0]).loss.backward()
    trained = list(model.parameters())
    with pytest.raises(tierflow.UsageError, match=r"is not in the optimizer \(1 parameters are not\)"):
        tierflow.resume(model, tierflow.optim.AdamW(trained[1:]))
    with pytest.raises(tierflow.UsageError, match="takes the model's tierflow.optim.AdamW, not a SGD"):
        tierflow.resume(model, torch.optim.SGD(trained))
    assert tierflow.resume(model, opt) == 0
    model(**batches("gpt2", 1)[0]).loss.backward()
    tierflow.close(model, discard=True)
    with pytest.raises(tierflow.UsageError, match="was closed"):
        opt.step()


def test_a_checkpoint_begins_a_durable_run(made, tmp_path):
    model, opt, begin = made
    tierflow.save_checkpoint(model, opt, tmp_path / "checkpoint")
    expected = masters(model)
    model, opt, done = begin(folders=[tmp_path / "b"])
    tierflow.load_checkpoint(model, opt, tmp_path / "checkpoint")
    tierflow.close(model)
    model, _, done = begin(folders=[tmp_path / "b"])
    assert done == 0 and all(torch.equal(weight, expected[name]) for name, weight in masters(model).items())


def test_what_ended_before_its_first_commit_is_begun_anew(tmp_path, script, whole):
    script(tmp_path, kill_at=0, kill_in="forward")
    (tmp_path / "state.tfv").write_bytes(bytes(4096))  # killed while it was made
    (tmp_path / "state.tfv").chmod(0o600)
    (tmp_path / "state.tfv.owner").unlink()
    run = script(tmp_path)
    assert run[0] == 0 and same(run, whole["loop"])


def test_the_program_says_what_the_state_is(made, tmp_path):
    tierflow.close(made[0])
    a = str(tmp_path / "a")
    code, out, _ = tierflow_program("status", a)
    assert code == 0 and "state after step 2\ngeneration 3, the newest of 2 that are kept; " in out
    assert "\nthe script that made it goes on with it\n" in out and f"`tierflow export --storage {a} --out FOLDER` writes it as a model folder" in out
    code, out, _ = tierflow_program("verify", a)
    assert code == 0 and out.startswith("whole: the state after step 2")


def test_random_numbers_of_python_and_numpy_go_on(made, tmp_path):
    model, opt, begin = made

    def drawn():
        return random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist(), float(numpy.random.standard_normal())

    random.seed(7)
    numpy.random.seed(8)
    random.gauss(0, 1)  # which keeps a second number in store
    numpy.random.standard_normal()
    model(**batches("gpt2", 3)[2]).loss.backward()
    opt.step()
    expected = drawn()
    tierflow.close(model)
    random.seed(9)
    numpy.random.seed(9)
    assert drawn() != expected
    _, _, done = begin()
    assert done == 3 and drawn() == expected


@pytest.mark.parametrize("call", ["write", "flush"])
def test_a_drive_that_is_full_costs_a_commit_and_not_the_run(call, script, whole, tmp_path):
    """What lies beside the state is written anew by each commit, and has no room of its own. The next step tries again."""
    run = script(tmp_path / "a", fail_call=f"{call}:state.tfv.beside.A.partial:28", close=False)
    assert run[0] == 0 and same(run, whole["loop"])
    run = script(tmp_path / "a")
    assert run[0] == STEPS - 1 and same(run, whole["loop"])


def test_a_loop_ends_in_order_when_it_is_told_to(made):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        with tierflow.stop_signals() as stop:
            assert not stop and stop.signal == 0
            os.kill(os.getpid(), number)
            for _ in range(100):
                if stop:
                    break
                time.sleep(0.01)
            assert stop and stop.signal == number and signal.getsignal(number) == before  # a second one acts as before
        assert signal.getsignal(number) == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with tierflow.stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    refused = []

    def elsewhere():
        try:
            with tierflow.stop_signals():
                pass
        except tierflow.UsageError as error:
            refused.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1 and "main thread" in refused[0]


def test_without_durable_nothing_has_a_name(tmp_path):
    plan = plan_of([tmp_path], durable=False)
    model = tierflow.wrap(gpt2(), plan)
    assert not list(pathlib.Path(tmp_path).iterdir())
    tierflow.close(model)


def test_killed_while_it_writes_beside_the_next_generation(made, tmp_path):
    model, _, begin = made
    tierflow.close(model)
    (tmp_path / "a" / "state.tfv.beside.A").write_bytes(b"of generation 4, which was never committed")
    assert begin()[2] == 2


def test_on_another_number_of_drives_it_goes_on_to_the_bit(script, whole, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    script(a, kill_at=3, kill_in="step")
    script(a, b, kill_at=4, kill_in="step")
    assert {path.name for path in b.iterdir()} == {"state.tfv", "state.tfv.owner"}
    run = script(b, calls=tmp_path / "calls")
    assert run[0] == 4 and same(run, whole["loop"]) and not list(a.iterdir())
    # What lies beside the copy is durable before what was copied goes.
    calls = (tmp_path / "calls").read_text().splitlines()
    copied = next(index for index, call in enumerate(calls) if call.startswith(f"rename {b}/state.tfv.beside"))
    assert f"flush {b}" in calls[copied : calls.index(f"unlink {a}/state.tfv")]


def test_killed_in_a_move_it_goes_on_to_the_bit(script, whole, tmp_path):
    """When all of it is copied after a commit of nothing, which makes the number even; and when it is committed."""
    script(tmp_path / "begun", kill_at=3, kill_in="step")
    for call in ("rename:state.tfv.beside.A.partial:1", "rename:/a/state.tfv-moving.tfv:1")[: None if KILLS else 1]:
        a, b = (tmp_path / call.replace("/", "-") / name for name in "ab")
        shutil.copytree(tmp_path / "begun", a)
        script(a, b, kill_call=call)
        assert (b / "state.tfv-moving.tfv").exists()
        run = script(a, b, small=False)
        assert run[0] == 3 and same(run, whole["loop"])


def test_a_move_is_said(made, tmp_path, caplog):
    model, _, begin = made
    tierflow.close(model)
    assert begin(folders=[tmp_path / "a", tmp_path / "b"])[2] == 2
    assert f"the state lies in {tmp_path / 'a'}: it is copied into the 2 folders of this run" in caplog.text
    assert "is damaged" not in caplog.text


def test_other_budgets_cut_the_state_anew(tmp_path, caplog):
    """Its tables are four of the smallest chunks."""

    def go_on(host, steps, durable=True):
        torch.manual_seed(4)
        budget = tierflow.Budget(device="64MiB", host=host, storage=[tmp_path / "s"], activations=0.0, durable=durable)
        model = tierflow.wrap(gpt2(vocab_size=4096, n_layer=1), tierflow.Plan(budget, allow_any_filesystem=True, precision="fp32-master+adam32"))
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
        for batch in batches("gpt2", 3)[tierflow.resume(model, opt) if durable else 0 : steps]:
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        weights = masters(model)
        tierflow.close(model)
        return weights

    expected = go_on("64MiB", 3, durable=False)
    go_on("64MiB", 1)
    assert "chunks" not in caplog.text
    go_on("1200KiB", 2)  # too little for such chunks
    assert caplog.text.count("has chunks for other budgets (327680 elements, here 65536)") == 1 and "is damaged" not in caplog.text
    weights = go_on("128MiB", 3)
    assert caplog.text.count("has chunks for other budgets") == 2 and "is damaged" not in caplog.text
    assert weights.keys() == expected.keys() and all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_a_forked_child_does_not_hold_the_state_of_its_dead_parent(script, whole, tmp_path):
    """As a DataLoader's worker, which outlives a script that is killed."""
    worker = tmp_path / "worker"
    script(tmp_path / "a", kill_at=3, kill_in="step", worker=str(worker))
    try:
        run = script(tmp_path / "a")
        os.kill(int(worker.read_text()), 0)  # it lived meanwhile
        assert run[0] == 3 and same(run, whole["loop"])
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)


def test_a_script_of_another_run_moves_nothing(made, tmp_path):
    model, _, begin = made
    tierflow.close(model)
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(tierflow.Error, match="another seed"):
        begin(plan=plan_of([a, b], seed=1))
    assert not b.exists() or not list(b.iterdir())
    assert begin()[2] == 2
