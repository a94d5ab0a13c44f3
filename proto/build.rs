//! Compiles the protos without protoc.

use prost::Message as _;

const PROTOS: [&str; 8] = [
    "velox/v1/backend.proto",
    "velox/v1/tensor.proto",
    "velox/v1/inference.proto",
    "velox/v1/models.proto",
    "velox/v1/capabilities.proto",
    "velox/v1/admin.proto",
    "velox/worker/v1/control.proto",
    "velox/worker/v1/step.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=velox");
    let descriptors = protox::compile(PROTOS, ["."])?;
    let out_dir = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out_dir.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
