use super::*;

const TIMES: Times = Times { answer: Duration::from_secs(60) };
const GRACE: Duration = Duration::from_secs(3);
const EXITED: Outcome = Outcome::Exited { code: 7 };

fn gone() -> Failure {
    Failure::Setup { detail: "x".into() }
}

fn phases() -> Vec<Phase> {
    vec![
        Phase::Created,
        Phase::Preparing,
        Phase::Spawning,
        Phase::Answering,
        Phase::Configuring,
        Phase::CopyingIn,
        Phase::Initialising,
        Phase::StartingMain,
        Phase::Dormant,
        Phase::Waking,
        Phase::Finding,
        Phase::Running,
        Phase::Reconnecting,
        Phase::Sleeping { then: Rest::Snapshot(After::GoOn) },
        Phase::Sleeping { then: Rest::Snapshot(After::End) },
        Phase::Sleeping { then: Rest::Pause },
        Phase::Saving { after: After::GoOn },
        Phase::Saving { after: After::End },
        Phase::Saving { after: After::Keep },
        Phase::Keeping,
        Phase::Pausing,
        Phase::Paused,
        Phase::Rousing,
        Phase::StoppingMain,
        Phase::Draining { outcome: EXITED },
        Phase::ShuttingDown { outcome: EXITED },
        Phase::Abandoning { outcome: EXITED },
        Phase::Ending { outcome: EXITED },
        Phase::CleaningUp { outcome: EXITED },
        Phase::Stopped { outcome: EXITED },
    ]
}

fn inputs() -> Vec<Input> {
    let deadlines = [
        Deadline::Start,
        Deadline::Answer,
        Deadline::Grace,
        Deadline::Drain,
        Deadline::PowerOff,
        Deadline::Reconnect,
        Deadline::Sleep,
    ];
    let mut inputs = vec![
        Input::Start,
        Input::Prepared,
        Input::Spawned,
        Input::Loaded,
        Input::Activate,
        Input::Woken,
        Input::Rest(Rest::Snapshot(After::GoOn)),
        Input::Rest(Rest::Pause),
        Input::Slept,
        Input::NotSlept,
        Input::Saved,
        Input::Kept,
        Input::NotKept,
        Input::Halted,
        Input::Resume,
        Input::Answered,
        Input::Configured,
        Input::CopiedIn,
        Input::Initialised,
        Input::MainStarted,
        Input::Failed(gone()),
        Input::MainEnded(EXITED),
        Input::Drained,
        Input::ChannelLost,
        Input::ChannelBack,
        Input::Stop { grace: GRACE },
        Input::Kill,
        Input::VmmEnded(VmmEnd::Signal(9)),
        Input::VmmEnded(VmmEnd::PoweredOff),
        Input::CleanedUp,
    ];
    inputs.extend(deadlines.map(Input::DeadlinePassed));
    inputs
}

/// Whether a VMM process may exist in this phase.
fn has_vmm(phase: &Phase) -> bool {
    !matches!(
        phase,
        Phase::Created
            | Phase::Preparing
            | Phase::Spawning
            | Phase::Abandoning { .. }
            | Phase::CleaningUp { .. }
            | Phase::Stopped { .. }
    )
}

fn run(mut phase: Phase, inputs: &[Input]) -> (Phase, Vec<Command>) {
    let mut last = Vec::new();
    for input in inputs {
        (phase, last) = phase.on(input.clone(), TIMES);
    }
    (phase, last)
}

#[test]
fn a_program_runs_and_its_exit_is_the_outcome() {
    use Command as C;
    let steps = [
        (Input::Start, Phase::Preparing, vec![C::Prepare]),
        (Input::Prepared, Phase::Spawning, vec![C::Spawn]),
        (Input::Spawned, Phase::Answering, vec![C::Arm(Deadline::Answer, TIMES.answer), C::Greet]),
        (Input::Answered, Phase::Configuring, vec![C::Configure]),
        (Input::Configured, Phase::CopyingIn, vec![C::CopyIn]),
        (Input::CopiedIn, Phase::Initialising, vec![C::Initialise]),
        (Input::Initialised, Phase::StartingMain, vec![C::StartMain]),
        (Input::MainStarted, Phase::Running, vec![]),
        (
            Input::MainEnded(EXITED),
            Phase::Draining { outcome: EXITED },
            vec![C::Arm(Deadline::Drain, DRAIN), C::Drain],
        ),
        (
            Input::Drained,
            Phase::ShuttingDown { outcome: EXITED },
            vec![C::Arm(Deadline::PowerOff, POWER_OFF), C::ShutDown],
        ),
        (Input::VmmEnded(VmmEnd::PoweredOff), Phase::CleaningUp { outcome: EXITED }, vec![C::CleanUp]),
        (Input::CleanedUp, Phase::Stopped { outcome: EXITED }, vec![]),
    ];
    let mut phase = Phase::Created;
    for (input, next, commands) in steps {
        let at = phase.clone();
        assert_eq!(phase.on(input.clone(), TIMES), (next.clone(), commands), "{at:?} on {input:?}");
        phase = next;
    }
}

#[test]
fn a_kill_in_any_phase_ends_in_stopped_and_leaves_no_vmm() {
    for phase in phases() {
        let (next, commands) = phase.clone().on(Input::Kill, TIMES);
        assert_eq!(
            has_vmm(&phase),
            commands.contains(&Command::KillVmm) || matches!(phase, Phase::Ending { .. }),
            "{phase:?}"
        );
        let end = match next {
            Phase::Abandoning { .. } => run(next, &[Input::Failed(gone()), Input::CleanedUp]),
            _ => run(next, &[Input::VmmEnded(VmmEnd::Signal(9)), Input::CleanedUp]),
        };
        assert!(matches!(end.0, Phase::Stopped { .. }), "{phase:?} ends in {:?}", end.0);
    }
}

#[test]
fn the_end_of_the_vmm_is_cleaned_up_after_from_every_phase_that_has_one() {
    for phase in phases() {
        let (next, commands) = phase.clone().on(Input::VmmEnded(VmmEnd::Signal(11)), TIMES);
        if has_vmm(&phase) {
            assert!(matches!(next, Phase::CleaningUp { .. }), "{phase:?} goes to {next:?}");
            assert_eq!(commands, [Command::CleanUp], "{phase:?}");
        } else {
            assert_eq!((next, commands), (phase, vec![]));
        }
    }
}

#[test]
fn a_spawn_that_a_kill_overtook_is_killed_when_it_arrives() {
    let (phase, commands) = run(Phase::Spawning, &[Input::Kill, Input::Spawned]);
    assert_eq!(phase, Phase::Ending { outcome: Outcome::Killed });
    assert_eq!(commands, [Command::KillVmm]);
}

#[test]
fn every_pair_of_phase_and_input_keeps_the_rules() {
    for phase in phases() {
        for input in inputs() {
            let (next, commands) = phase.clone().on(input.clone(), TIMES);
            let pair = format!("{phase:?} on {input:?} gave {next:?} with {commands:?}");
            // An outcome once known never changes.
            if let Some(outcome) = phase.outcome() {
                assert_eq!(next.outcome(), Some(outcome), "{pair}");
            }
            // No VMM is forgotten: its phases are left only by its end.
            if has_vmm(&phase) && !has_vmm(&next) {
                assert!(matches!(input, Input::VmmEnded(_)), "{pair}");
            }
            // A VMM is killed only where there may be one, and cleaning up starts only when there is none.
            if commands.contains(&Command::KillVmm) {
                assert!(has_vmm(&next), "{pair}");
            }
            assert_eq!(
                commands.contains(&Command::CleanUp),
                matches!(next, Phase::CleaningUp { .. }) && next != phase,
                "{pair}"
            );
            // What is stopped stays stopped.
            if matches!(phase, Phase::Stopped { .. }) {
                assert_eq!((&next, commands.len()), (&phase, 0), "{pair}");
            }
        }
    }
}

#[test]
fn what_does_not_concern_a_phase_changes_nothing() {
    let heard =
        |phase: &Phase, input: &Input| phase.clone().on(input.clone(), TIMES) != (phase.clone(), vec![]);
    let table: Vec<(Phase, usize)> = phases()
        .into_iter()
        .map(|p| {
            let n = inputs().iter().filter(|i| heard(&p, i)).count();
            (p, n)
        })
        .collect();
    let counts: Vec<usize> = table.iter().map(|(_, n)| *n).collect();
    // One number per phase, in the order of `phases`: how many of the inputs it reacts to.
    let boots = [4, 4, 5, 7, 8, 7, 7, 8];
    let is_made_of_a_snapshot = [6, 7];
    let runs = [10, 9, 7];
    let sleeps = [10, 10, 10, 6, 6, 6, 6, 6, 5, 8];
    let ends = [7, 6, 6, 4, 2, 1, 0];
    let expected = [&boots[..], &is_made_of_a_snapshot, &runs, &sleeps, &ends].concat();
    assert_eq!(counts, expected, "{table:#?}");
}

#[test]
fn a_stop_gives_the_main_process_its_grace_and_then_ends_the_vm() {
    let (phase, commands) = run(Phase::Running, &[Input::Stop { grace: GRACE }]);
    assert_eq!(commands, [Command::Arm(Deadline::Grace, GRACE), Command::SignalMain]);
    assert_eq!(run(phase.clone(), &[Input::MainEnded(EXITED)]).0, Phase::Draining { outcome: EXITED });
    let (phase, commands) = run(phase, &[Input::DeadlinePassed(Deadline::Grace)]);
    let killed = Outcome::Signalled { signal: 9, out_of_memory: false, timed_out: false };
    assert_eq!((phase, commands), (Phase::Ending { outcome: killed }, vec![Command::KillVmm]));
}

#[test]
fn a_guest_that_panics_while_it_boots_fails_at_once() {
    let (phase, _) = run(Phase::Answering, &[Input::VmmEnded(VmmEnd::Reset)]);
    assert_eq!(
        phase.outcome(),
        Some(&Outcome::Failed { failure: Failure::EndedInBoot { vmm: VmmEnd::Reset }, console: vec![] })
    );
}

#[test]
fn a_found_vm_goes_on_where_its_record_says() {
    let alive = VmmRemains::Alive;
    let gone = VmmRemains::Gone;
    assert!(matches!(Phase::adopted(Remains::Unfinished { vmm: alive }).0, Phase::Finding));
    assert!(matches!(Phase::adopted(Remains::Unfinished { vmm: gone }).0, Phase::CleaningUp { .. }));
    assert!(matches!(Phase::adopted(Remains::Started { vmm: alive }).0, Phase::Reconnecting));
    assert!(matches!(Phase::adopted(Remains::Started { vmm: gone }).0, Phase::CleaningUp { .. }));
    // What was known of the end is not lost.
    let ended = |vmm| Phase::adopted(Remains::Ended { vmm, outcome: EXITED });
    assert_eq!(ended(alive), (Phase::Ending { outcome: EXITED }, vec![Command::KillVmm]));
    assert_eq!(ended(gone), (Phase::CleaningUp { outcome: EXITED }, vec![Command::CleanUp]));
}

#[test]
fn a_vm_that_was_found_booting_runs_if_its_guest_knows_the_main_process() {
    let (found, _) = Phase::adopted(Remains::Unfinished { vmm: VmmRemains::Alive });
    let (asked, commands) = run(found.clone(), &[Input::ChannelBack]);
    assert_eq!((&asked, commands), (&Phase::Finding, vec![Command::FollowMain]));
    assert_eq!(run(asked.clone(), &[Input::MainStarted]).0, Phase::Running);
    let ended = run(asked.clone(), &[Input::MainStarted, Input::MainEnded(EXITED)]).0;
    assert_eq!(ended, Phase::Draining { outcome: EXITED });
    let owner_gone = Phase::Ending { outcome: failed(Failure::OwnerGone) };
    assert_eq!(run(asked, &[Input::Failed(Failure::MainLost)]).0, owner_gone);
    assert_eq!(run(found, &[Input::DeadlinePassed(Deadline::Reconnect)]).0, owner_gone);
}

#[test]
fn a_vm_that_nobody_starts_is_given_up_and_one_that_was_started_is_not() {
    let (phase, commands) = Phase::created();
    assert_eq!(commands, [Command::Arm(Deadline::Start, START)]);
    let passed = Input::DeadlinePassed(Deadline::Start);
    let (given_up, commands) = phase.clone().on(passed.clone(), TIMES);
    assert!(matches!(given_up, Phase::CleaningUp { .. }) && commands == [Command::CleanUp], "{given_up:?}");
    let (started, _) = phase.on(Input::Start, TIMES);
    assert_eq!(started.clone().on(passed, TIMES), (started, vec![]));
}

/// Phases in which a machine stands still, or may, and has to go on or to end.
fn asleep() -> Vec<Phase> {
    let is_asleep =
        |phase: &Phase| matches!(phase.state(), crate::status::State::Asleep | crate::status::State::Paused);
    phases().into_iter().filter(is_asleep).collect()
}

#[test]
fn a_vm_of_a_snapshot_waits_loaded_until_somebody_has_it_and_is_served_only_when_its_guest_confirms() {
    use Command as C;
    let steps = [
        (Input::Start, Phase::Preparing, vec![C::Prepare]),
        (Input::Prepared, Phase::Spawning, vec![C::Spawn]),
        (Input::Loaded, Phase::Dormant, vec![]),
        (Input::Activate, Phase::Waking, vec![C::Arm(Deadline::Answer, TIMES.answer), C::Wake]),
        (Input::Woken, Phase::Running, vec![C::FollowMain]),
    ];
    let mut phase = Phase::Created;
    for (input, next, commands) in steps {
        let at = phase.clone();
        assert_eq!(phase.on(input.clone(), TIMES), (next.clone(), commands), "{at:?} on {input:?}");
        phase = next;
    }
    for input in [Input::Failed(gone()), Input::DeadlinePassed(Deadline::Answer)] {
        let (refused, commands) = Phase::Waking.on(input.clone(), TIMES);
        assert!(matches!(refused, Phase::Ending { .. }) && commands == [C::KillVmm], "{input:?}");
    }
    // Nobody has it twice.
    assert_eq!(Phase::Waking.on(Input::Activate, TIMES), (Phase::Waking, vec![]));
}

#[test]
fn a_vm_that_was_put_to_sleep_goes_on_whatever_happens_to_its_snapshot() {
    let rest = Input::Rest(Rest::Snapshot(After::GoOn));
    let (sleeping, commands) = Phase::Running.on(rest.clone(), TIMES);
    assert_eq!(commands, [Command::Arm(Deadline::Sleep, FALL_ASLEEP), Command::Sleep]);
    let (saving, commands) = sleeping.clone().on(Input::Slept, TIMES);
    assert_eq!((&saving, commands), (&Phase::Saving { after: After::GoOn }, vec![Command::Save]));
    let goes_on = Phase::rouse();
    for input in [Input::Saved, Input::Failed(gone())] {
        assert_eq!(saving.clone().on(input, TIMES), goes_on);
    }
    for input in [Input::Failed(gone()), Input::ChannelLost, Input::DeadlinePassed(Deadline::Sleep)] {
        assert_eq!(sleeping.clone().on(input, TIMES), goes_on);
    }
    assert_eq!(Phase::Rousing.on(Input::Woken, TIMES), (Phase::Running, vec![Command::FollowMain]));
    // An agent that knows no sleep has changed nothing.
    assert_eq!(sleeping.on(Input::NotSlept, TIMES), (Phase::Running, vec![Command::FollowMain]));
    // It has no second life to sleep for.
    for phase in asleep() {
        assert_eq!(phase.clone().on(rest.clone(), TIMES), (phase, vec![]));
    }
}

#[test]
fn a_machine_that_is_suspended_stands_still_until_its_snapshot_is_safe() {
    let saving = Phase::Saving { after: After::Keep };
    let (kept, _) = saving.clone().on(Input::Saved, TIMES);
    assert_eq!(kept, Phase::Keeping);
    // Who resumes it would have it go on from where a snapshot goes on, too.
    assert_eq!(kept.clone().on(Input::Resume, TIMES), (kept.clone(), vec![]));
    assert_eq!(kept.clone().on(Input::NotKept, TIMES), Phase::rouse());
    assert_eq!(
        kept.on(Input::Kept, TIMES),
        (Phase::Ending { outcome: Outcome::Killed }, vec![Command::KillVmm])
    );
    assert_eq!(saving.on(Input::Failed(gone()), TIMES), Phase::rouse());
}

#[test]
fn a_machine_that_was_there_for_its_snapshot_ends_with_it() {
    let (saving, _) = run(Phase::Running, &[Input::Rest(Rest::Snapshot(After::End)), Input::Slept]);
    let (ending, commands) = saving.clone().on(Input::Saved, TIMES);
    assert_eq!((ending, commands), (Phase::Ending { outcome: Outcome::Killed }, vec![Command::KillVmm]));
    assert!(matches!(saving.on(Input::Failed(gone()), TIMES).0, Phase::Ending { .. }));
}

#[test]
fn a_paused_vm_stays_so_until_it_is_resumed_or_ended() {
    let (paused, _) = run(Phase::Running, &[Input::Rest(Rest::Pause), Input::Slept, Input::Halted]);
    assert_eq!(paused, Phase::Paused);
    for input in [Input::ChannelLost, Input::DeadlinePassed(Deadline::Sleep), Input::Activate] {
        assert_eq!(paused.clone().on(input, TIMES), (Phase::Paused, vec![]));
    }
    assert_eq!(paused.clone().on(Input::Resume, TIMES), Phase::rouse());
    assert_eq!(run(paused, &[Input::Resume, Input::Woken]).0, Phase::Running);
    assert_eq!(Phase::Pausing.on(Input::Failed(gone()), TIMES), Phase::rouse());
}

#[test]
fn no_phase_of_sleep_lasts_for_ever_but_a_pause() {
    for phase in asleep().into_iter().filter(|phase| *phase != Phase::Paused) {
        let ways: Vec<Input> = inputs()
            .into_iter()
            .filter(|input| phase.clone().on(input.clone(), TIMES).0 != phase)
            .filter(|input| !matches!(input, Input::Kill | Input::Stop { .. }))
            .collect();
        assert!(!ways.is_empty(), "{phase:?}");
    }
    // Until the guest is there again, or is given up.
    let (rousing, commands) = Phase::rouse();
    assert!(commands.contains(&Command::Arm(Deadline::Reconnect, RECONNECT)));
    assert!(matches!(rousing.on(Input::DeadlinePassed(Deadline::Reconnect), TIMES).0, Phase::Ending { .. }));
}

#[test]
fn the_next_owner_has_a_sleeper_go_on_keeps_what_is_dormant_and_ends_what_is_of_no_use() {
    let (alive, gone) = (VmmRemains::Alive, VmmRemains::Gone);
    assert_eq!(Phase::adopted(Remains::Dormant { vmm: alive }), (Phase::Dormant, vec![Command::Attach]));
    assert_eq!(Phase::adopted(Remains::Asleep { vmm: alive }), Phase::rouse());
    assert_eq!(Phase::adopted(Remains::Paused { vmm: alive }), (Phase::Pausing, vec![Command::Pause]));
    assert!(matches!(Phase::adopted(Remains::Useless { vmm: alive }).0, Phase::Ending { .. }));
    for remains in [
        Remains::Dormant { vmm: gone },
        Remains::Asleep { vmm: gone },
        Remains::Paused { vmm: gone },
        Remains::Useless { vmm: gone },
    ] {
        let (phase, commands) = Phase::adopted(remains.clone());
        assert!(matches!(phase, Phase::CleaningUp { .. }), "{remains:?}");
        assert_eq!(commands, [Command::CleanUp], "{remains:?}");
    }
}
