use super::*;

#[test]
fn a_description_agrees_with_its_body() {
    for kernel in KERNELS {
        let buffers = || kernel.inputs.iter().chain(kernel.outputs);
        for buffer in buffers() {
            assert!(
                mentions(kernel.source, buffer.name),
                "{}: {}",
                kernel.name,
                buffer.name
            );
        }
        for constant in kernel.constants {
            // A type may show in the signature only.
            let typed = buffers().any(|buffer| buffer.holds == Holds::Constant(constant.name));
            assert!(
                typed || mentions(kernel.source, constant.name),
                "{}: {}",
                kernel.name,
                constant.name
            );
        }
        for buffer in buffers() {
            if let Holds::Constant(name) = buffer.holds {
                let elements = kernel.constants.iter().any(|constant| {
                    constant.name == name && matches!(constant.allowed, Allowed::Elements(_))
                });
                assert!(elements, "{}: {}", kernel.name, buffer.name);
            }
        }
        if let Threads::Constant(name) = kernel.threads {
            let integers = kernel.constants.iter().any(|constant| {
                constant.name == name && matches!(constant.allowed, Allowed::Integers(_))
            });
            assert!(integers, "{}: {name}", kernel.name);
        }
    }
}

/// Whether the code, not a comment, has the word.
fn mentions(source: &str, word: &str) -> bool {
    let code = source
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""));
    let mut words =
        code.flat_map(|line| line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
    words.any(|found| found == word)
}

#[test]
fn no_body_spells_an_address_space() {
    // MLX decides by an input's size whether it lies in `constant` or `device`.
    for kernel in KERNELS {
        for word in ["device", "constant", "threadgroup"] {
            assert!(!mentions(kernel.source, word), "{}: {word}", kernel.name);
        }
    }
}

#[test]
fn names_differ() {
    let mut names: Vec<_> = KERNELS.iter().map(|kernel| kernel.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), KERNELS.len());
}

#[test]
fn only_values_that_the_body_was_written_for_are_taken() {
    assert!(BIT_PACK.variant(&[Value::Integer(3)]).is_ok());
    assert!(matches!(
        BIT_PACK.variant(&[Value::Integer(5)]),
        Err(MetalError::Value {
            constant: "BITS",
            ..
        })
    ));
    assert!(BIT_PACK.variant(&[Value::Boolean(true)]).is_err());
    assert!(matches!(
        BIT_PACK.variant(&[]),
        Err(MetalError::Count {
            expected: 1,
            actual: 0,
            ..
        })
    ));
}

#[test]
fn a_launch_covers_the_items() {
    let pack = BIT_PACK.variant(&[Value::Integer(4)]).unwrap();
    let launch = |variant: &Variant, items| variant.launch(items).unwrap();
    assert_eq!(
        launch(&pack, [300, 2, 1]),
        Some(Launch {
            grid: [300, 2, 1],
            threadgroup: [256, 1, 1]
        })
    );
    assert_eq!(launch(&pack, [3, 2, 1]).unwrap().threadgroup, [3, 1, 1]);
    assert_eq!(launch(&pack, [3, 0, 1]), None);
    let hadamard = HADAMARD
        .variant(&[Value::Element(Element::F32), Value::Integer(64)])
        .unwrap();
    assert_eq!(
        launch(&hadamard, [5, 1, 1]),
        Some(Launch {
            grid: [320, 1, 1],
            threadgroup: [64, 1, 1]
        })
    );
    assert!(matches!(
        hadamard.launch([u32::MAX, 1, 1]),
        Err(MetalError::Items { threads: 64, .. })
    ));
}

#[test]
fn a_buffer_has_the_type_of_its_parameter() {
    let variant = HADAMARD
        .variant(&[Value::Element(Element::Bf16), Value::Integer(2)])
        .unwrap();
    assert_eq!(variant.element(&HADAMARD.inputs[0]), Some(Element::Bf16));
    assert_eq!(variant.element(&BIT_PACK.inputs[1]), Some(Element::U32));
}

#[test]
fn turns_wrap_around() {
    use std::f64::consts::{PI, TAU};
    assert_eq!(turns(0.0), 0);
    assert_eq!(turns(PI), 1 << 63);
    assert_eq!(turns(PI + TAU), 1 << 63);
    assert_eq!(turns(-PI / 2.0), 3 << 62);
    assert_eq!(turns(f64::NAN), 0);
    assert_eq!(turns(f64::INFINITY), 0);
}
