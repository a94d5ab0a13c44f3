//! Planted faults: proof that the emulation catches what it says it catches.

use velox_mlx::metal::{
    Allowed, Buffer, Constant, Element, Holds, Kernel, Threads, Value, Variant,
};

use crate::machine::{bytes, elements, emulation, noise};

/// What the harness must be told for each number of `emulation/faults.metal`.
const REPORTS: [(u32, &str); 17] = [
    (1, "values[64] is out of bounds: it has 64 elements"),
    // An array of one thread, a shift by 32 bits, a negative float as an unsigned number.
    (2, "undefined behaviour"),
    (3, "undefined behaviour"),
    (4, "undefined behaviour"),
    (
        5,
        "large brings threadgroup memory to 32772 bytes; Metal has 32768",
    ),
    (
        6,
        "shared[20] is read by thread 21 before anything was written there",
    ),
    (7, "shared[64] is out of bounds: it has 64 elements"),
    (
        8,
        "divergent flow: thread 0 waits at line 37 (threadgroup_barrier), thread 40 has finished",
    ),
    (
        9,
        "divergent flow: thread 0 waits at line 37 (threadgroup_barrier), thread 32 at line 33 (threadgroup_barrier)",
    ),
    // A barrier that orders other memory is none for threadgroup memory.
    (
        10,
        "race: no barrier between thread 0 writing shared[0] and thread 1 reading it",
    ),
    (
        11,
        "race: no barrier between thread 0 writing shared[0] and thread 1 reading it",
    ),
    (
        12,
        "race: no barrier between another thread reading shared[61] and thread 63 writing it",
    ),
    (
        13,
        "divergent flow: thread 0 waits at line 46 (simd_sum), thread 16 has finished",
    ),
    (
        14,
        "simd_shuffle_xor of lane 0 at line 49 reads lane 32 of 32",
    ),
    (15, "copied[7] was never written"),
    (
        16,
        "race: threads 0 and 63 of the grid both write copied[0]",
    ),
    (17, "copied[64] is out of bounds: it has 64 elements"),
];

static PLANTED: Kernel = Kernel {
    name: "planted",
    source: include_str!("../../emulation/faults.metal"),
    constants: &[Constant {
        name: "FAULT",
        allowed: Allowed::Integers(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]),
    }],
    inputs: &[Buffer {
        name: "values",
        holds: Holds::Fixed(Element::F32),
    }],
    outputs: &[
        Buffer {
            name: "copied",
            holds: Holds::Fixed(Element::F32),
        },
        Buffer {
            name: "sums",
            holds: Holds::Fixed(Element::F32),
        },
    ],
    threads: Threads::One,
};

const THREADS: u32 = 64;

fn planted(fault: u32) -> Variant {
    PLANTED.variant(&[Value::Integer(fault)]).unwrap()
}

pub(crate) fn variants() -> Vec<Variant> {
    (0..=17).map(planted).collect()
}

fn attempt(fault: u32, test: &str) -> Option<Result<[Vec<u8>; 2], String>> {
    let values = noise(64, 1);
    // 64 items of one thread each make one threadgroup.
    let emulation = emulation(test)?;
    Some(emulation.attempt(
        &planted(fault),
        [THREADS, 1, 1],
        &[&bytes(&values)],
        [256, 8],
    ))
}

#[test]
fn a_kernel_without_a_fault_passes() {
    let Some(result) = attempt(0, "a_kernel_without_a_fault_passes") else {
        return;
    };
    let [copied, sums] = result.unwrap();
    let values = noise(64, 1);
    let mut expected = values.clone();
    expected.rotate_right(1);
    expected[0] = values[0];
    assert_eq!(elements::<f32>(&copied), expected);
    // Lanes are added from first to last, as here.
    let expected: Vec<f32> = values
        .chunks(32)
        .map(|simdgroup| simdgroup.iter().sum())
        .collect();
    assert_eq!(elements::<f32>(&sums), expected);
}

#[test]
fn every_planted_fault_is_reported() {
    for (fault, report) in REPORTS {
        let Some(result) = attempt(fault, "every_planted_fault_is_reported") else {
            return;
        };
        let told = result.expect_err(report);
        assert!(
            told.contains(report),
            "fault {fault}: {told:?}, expected {report:?}"
        );
    }
}
