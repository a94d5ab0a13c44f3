//! Proof of which device produced a value.
//!
//! A [`Ran`] can only be made with a witness of its device, and a witness is constructed only inside the module
//! that evaluates on that device (`reference`, `cpu`, later `mlx/ffi`). Code between kernel and reply can
//! transform the value but not change its label.

use std::marker::PhantomData;

use crate::label::BackendLabel;

/// A witness type: one per device, with a constructor that is private to the evaluating module.
pub trait Device {
    /// What a value that ran there is labelled with.
    const LABEL: BackendLabel;
}

/// A value that was produced on device `D`.
#[derive(Debug)]
#[must_use = "dropping it loses the evidence of where the value came from"]
pub struct Ran<D, T> {
    value: T,
    device: PhantomData<D>,
}

impl<D: Device, T> Ran<D, T> {
    /// Labels a value; the caller shows that it evaluated on the device by owning a witness.
    pub fn new(_witness: D, value: T) -> Self {
        Self {
            value,
            device: PhantomData,
        }
    }

    /// Returns the label that the type carries.
    #[must_use]
    pub fn label(&self) -> BackendLabel {
        D::LABEL
    }

    /// Transforms the value on the way; the label stays.
    pub fn map<U>(self, transform: impl FnOnce(T) -> U) -> Ran<D, U> {
        Ran {
            value: transform(self.value),
            device: PhantomData,
        }
    }

    /// Joins two values of one device.
    pub fn zip<U>(self, other: Ran<D, U>) -> Ran<D, (T, U)> {
        Ran {
            value: (self.value, other.value),
            device: PhantomData,
        }
    }

    /// Borrows the value together with its label, to derive something from it.
    pub fn as_ref(&self) -> Ran<D, &T> {
        Ran {
            value: &self.value,
            device: PhantomData,
        }
    }

    /// Borrows the value.
    pub fn value(&self) -> &T {
        &self.value
    }

    /// Gives up the label; for the one place that writes it into a reply.
    pub fn into_value(self) -> T {
        self.value
    }
}
