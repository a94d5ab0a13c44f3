//! The same test on every device of MLX that this machine has.

use velox_mlx::ffi::{DeviceStream, MlxDevice};

/// Whether the device is here; says loudly what is skipped if not.
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
pub(crate) fn is_here<D: MlxDevice>(test: &str) -> bool {
    match DeviceStream::<D>::open() {
        Ok(_stream) => true,
        Err(error) => {
            eprintln!("SKIPPED: {test} on {}: {error}", D::LABEL);
            false
        }
    }
}

/// Makes of each generic function `check::<D>()` a test on each device.
macro_rules! on_every_device {
    ($($check:ident),+ $(,)?) => {
        on_every_device!(@ mlx_cpu MlxCpuDevice: $($check),+);
        on_every_device!(@ mlx_cuda MlxCudaDevice: $($check),+);
        on_every_device!(@ metal MetalDevice: $($check),+);
    };
    (@ $module:ident $device:ident: $($check:ident),+) => {
        mod $module {
            use velox_mlx::ffi::$device;

            $(
                #[test]
                fn $check() {
                    if crate::devices::is_here::<$device>(stringify!($check)) {
                        super::$check::<$device>();
                    }
                }
            )+
        }
    };
}
pub(crate) use on_every_device;
