//! What goes into MLX and comes out of it, on its CPU device.

use velox_mlx::ffi::{DeviceStream, Dtype, MlxCpuDevice, MlxError, Tensor};

fn on_cpu<T>(ops: impl FnOnce() -> Result<T, MlxError>) -> Result<T, MlxError> {
    let stream = DeviceStream::<MlxCpuDevice>::open()?;
    Ok(stream.record(ops)?.into_value())
}

#[test]
fn bytes_need_no_alignment() {
    let values = [1.5_f32, -2.0, 3.25];
    let mut bytes = vec![0_u8];
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    for start in [0, 1] {
        // One of the two begins at an odd address.
        let shifted = [&[0_u8][..start], &bytes[1..]].concat();
        let read = on_cpu(|| Tensor::of_bytes(Dtype::F32, &shifted[start..], &[3])?.to_f32());
        assert_eq!(read.unwrap(), values);
    }
}

#[test]
fn a_refused_op_is_an_error_with_the_words_of_mlx() {
    let refused = on_cpu(|| {
        let one = Tensor::of_f32(&[1.0; 6], &[2, 3])?;
        one.times_transposed(&Tensor::of_f32(&[1.0; 8], &[2, 4])?)
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("matmul"), "{error}");
    let wrong = on_cpu(|| Tensor::of_f32(&[1.0; 5], &[2, 3])).unwrap_err();
    assert!(wrong.to_string().contains("do not fill"), "{wrong}");
    let part = on_cpu(|| Tensor::of_f32(&[1.0; 6], &[2, 3])?.slice(1, 2..5)).unwrap_err();
    assert!(part.to_string().contains("has no part 2..5"), "{part}");
    let parts = on_cpu(|| {
        let whole = Tensor::zeros(Dtype::F32, &[2, 4])?;
        let update = Tensor::of_f32(&[7.0, 8.0], &[2, 1])?;
        whole.with_slice(1, 2, &update)?.slice(1, 1..4)?.to_f32()
    });
    assert_eq!(parts.unwrap(), [0.0, 7.0, 0.0, 0.0, 8.0, 0.0]);
}
