//! The command line and what it means: [`Arguments`] as typed, [`Config`] as resolved.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use velox_proto::v1::Backend;

use crate::error::GatewayError;
use crate::listen::default_socket;
use crate::pool::{LoadShape, MAX_RESIDENT_MODELS, ModelSource, PoolConfig, WorkerProgram};
use crate::scheduler::SchedulerConfig;

/// Name of the worker's executable, beside ours.
const WORKER_PROGRAM: &str = "velox-kernel-worker";

/// The worker's executable with MLX, which need not be there.
const MLX_WORKER_PROGRAM: &str = "velox-kernel-worker-mlx";

/// Most rows of one worker: with a prompt they fill a plan.
const MAX_ROWS: u32 = 255;

/// Most worker processes.
const MAX_WORKERS: usize = 64;

/// Text that turns a listener off.
const NONE: &str = "none";

/// Serves language models over gRPC.
#[derive(Debug, Clone, Parser)]
#[command(name = "velox-gateway", version)]
pub struct Arguments {
    /// Model to load: a GGUF file, a Hugging Face folder, or a name in the model folder; `=NAME` serves it under
    /// another name. The first is the default model
    #[arg(long = "model", value_name = "PATH[=NAME]", env = "VELOX_MODEL")]
    pub models: Vec<String>,
    /// Folder of models that are given by name
    #[arg(long, value_name = "PATH", env = "VELOX_MODELS")]
    pub model_folder: Option<PathBuf>,
    /// Worker processes
    #[arg(long, default_value_t = 1)]
    pub workers: usize,
    /// Compute threads of each worker [default: cores divided by workers]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Backend of the models
    #[arg(long, default_value = "auto", value_parser = backend_names())]
    pub backend: String,
    /// KV method of the models [default: 16 bit]
    #[arg(long, value_name = "METHOD")]
    pub kv: Option<String>,
    /// Quantise float weights of the models when they are loaded; quantised ones stay as they are
    #[arg(long)]
    pub quantize: bool,
    /// Bits of a quantised weight: 4, 5 or 8
    #[arg(long, value_name = "BITS", default_value_t = 4, requires = "quantize")]
    pub bits: u32,
    /// Most tokens of prompt and answer together; 0 or less = as many as the model was trained for, which is the
    /// default and never exceeded
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    pub max_context: Option<i64>,
    /// Unix socket to listen on, or "none" [default: in the user's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Loopback address to listen on, or "none"
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50151")]
    pub listen: String,
    /// The worker's executable [default: velox-kernel-worker-mlx beside this one if it can be loaded, else
    /// velox-kernel-worker]
    #[arg(long, value_name = "PATH")]
    pub worker_program: Option<PathBuf>,
    /// Requests that may wait
    #[arg(long, default_value_t = SchedulerConfig::default().max_queue)]
    pub max_queue: usize,
    /// Requests that may run on one worker
    #[arg(long, default_value_t = SchedulerConfig::default().max_rows)]
    pub max_rows: u32,
    /// Memory for the caches of all requests, by worst case
    #[arg(long, value_name = "BYTES", default_value_t = SchedulerConfig::default().kv_budget_bytes)]
    pub kv_budget_bytes: u64,
    /// Seconds that a request waits while no worker can run it
    #[arg(long, value_name = "SECONDS", default_value_t = SchedulerConfig::default().worker_wait.as_secs())]
    pub worker_wait: u64,
    /// Seconds that running requests get at shutdown
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    /// Drain and exit when standard input ends: whoever started this cannot leave it running
    #[arg(long)]
    pub exit_with_stdin: bool,
    /// Log filter, for example "info" or "velox_gateway=debug"
    #[arg(long, default_value = "info", env = "VELOX_LOG")]
    pub log: String,
    /// Sends spans to this OpenTelemetry collector
    #[cfg(feature = "otlp")]
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
}

/// What the gateway runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// The worker pool.
    pub pool: PoolConfig,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// Where it listens.
    pub listen: ListenConfig,
    /// Time for running requests at shutdown.
    pub grace: Duration,
    /// Folder of models that are given by name.
    pub model_folder: PathBuf,
}

/// Where the gateway listens; at least one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenConfig {
    /// Unix socket.
    pub socket: Option<PathBuf>,
    /// Loopback address; port 0 = any.
    pub address: Option<SocketAddr>,
}

impl TryFrom<&Arguments> for Config {
    type Error = GatewayError;

    fn try_from(arguments: &Arguments) -> Result<Self, GatewayError> {
        let config = |text: String| GatewayError::Config(text);
        if arguments.workers == 0 || arguments.workers > MAX_WORKERS {
            return Err(config(format!(
                "{} workers, allowed are 1 to {MAX_WORKERS}",
                arguments.workers
            )));
        }
        if arguments.max_rows == 0 || arguments.max_rows > MAX_ROWS {
            return Err(config(format!(
                "max-rows is {}, allowed are 1 to {MAX_ROWS}",
                arguments.max_rows
            )));
        }
        let model_folder = match &arguments.model_folder {
            Some(folder) => folder.clone(),
            None => default_model_folder(),
        };
        let mut pool = PoolConfig::new(match &arguments.worker_program {
            Some(program) => WorkerProgram::given(program.clone()),
            None => {
                WorkerProgram::choose(beside_us(MLX_WORKER_PROGRAM)?, beside_us(WORKER_PROGRAM)?)
            }
        });
        // An empty VELOX_MODEL is none.
        for model in arguments.models.iter().filter(|model| !model.is_empty()) {
            let mut source = resolve_model(model, "", &model_folder)?;
            source.shape = LoadShape {
                quantize_bits: arguments.quantize.then_some(arguments.bits),
                // The flag's 0 and less mean no limit of ours.
                max_context_tokens: arguments
                    .max_context
                    .and_then(|tokens| u32::try_from(tokens).ok())
                    .filter(|&tokens| tokens > 0),
            };
            if pool.models.iter().any(|known| known.name == source.name) {
                return Err(config(format!("two models are named {:?}", source.name)));
            }
            pool.models.push(source);
        }
        if pool.models.len() > MAX_RESIDENT_MODELS {
            return Err(config(format!(
                "{} models, limit is {MAX_RESIDENT_MODELS}",
                pool.models.len()
            )));
        }
        pool.workers = arguments.workers;
        pool.threads_per_worker = Some(match arguments.threads {
            Some(0) => return Err(config("threads is 0, allowed are 1 and more".to_owned())),
            Some(threads) => threads,
            None => threads_per_worker(arguments.workers),
        });
        pool.backend = parse_backend(&arguments.backend);
        pool.kv_method.clone_from(&arguments.kv);
        pool.cache_limit_bytes = Some(arguments.kv_budget_bytes);
        Ok(Self {
            pool,
            scheduler: SchedulerConfig {
                max_queue: arguments.max_queue,
                max_rows: arguments.max_rows,
                kv_budget_bytes: arguments.kv_budget_bytes,
                worker_wait: Duration::from_secs(arguments.worker_wait),
                ..SchedulerConfig::default()
            },
            listen: listen_config(arguments)?,
            grace: Duration::from_secs(arguments.grace),
            model_folder,
        })
    }
}

fn listen_config(arguments: &Arguments) -> Result<ListenConfig, GatewayError> {
    let socket = match &arguments.socket {
        None => Some(default_socket()),
        Some(path) if path == Path::new(NONE) => None,
        Some(path) => {
            Some(std::path::absolute(path).map_err(GatewayError::io("the socket's path"))?)
        }
    };
    let address = match arguments.listen.as_str() {
        NONE => None,
        text => Some(text.parse().map_err(|_bad| {
            GatewayError::Config(format!("{text:?} is not an address of the form IP:PORT"))
        })?),
    };
    if socket.is_none() && address.is_none() {
        return Err(GatewayError::Config(
            "neither a socket nor an address to listen on".to_owned(),
        ));
    }
    Ok(ListenConfig { socket, address })
}

/// Finds a model by path, or by name in the model folder; "PATH=NAME" and `name` say how it is served.
///
/// # Errors
/// [`GatewayError::NoSuchModelFile`] if there is no such file or folder.
pub fn resolve_model(text: &str, name: &str, folder: &Path) -> Result<ModelSource, GatewayError> {
    let (text, alias) = match text.rsplit_once('=') {
        // A path may contain the sign itself.
        Some((path, alias)) if !alias.is_empty() && !Path::new(text).exists() => (path, alias),
        _ => (text, ""),
    };
    let candidates = [
        PathBuf::from(text),
        folder.join(format!("{text}.gguf")),
        folder.join(text),
    ];
    // A name must stay in its folder: only the first candidate may point elsewhere.
    let is_name = !text.is_empty() && !text.contains('/') && text != "." && text != "..";
    let allowed = if is_name {
        &candidates[..]
    } else {
        &candidates[..1]
    };
    let found = allowed
        .iter()
        .find(|path| path.exists())
        .ok_or_else(|| GatewayError::NoSuchModelFile(text.to_owned()))?;
    let path = std::path::absolute(found).map_err(GatewayError::io("the model's path"))?;
    let given = [name, alias].into_iter().find(|given| !given.is_empty());
    let name = match given {
        Some(given) => given.to_owned(),
        None => derived_name(&path)
            .ok_or_else(|| GatewayError::invalid("source", "file name is not valid UTF-8"))?,
    };
    Ok(ModelSource {
        name,
        path,
        shape: LoadShape::default(),
    })
}

fn derived_name(path: &Path) -> Option<String> {
    let part = if path.is_dir() {
        path.file_name()
    } else {
        path.file_stem()
    };
    part.and_then(|name| name.to_str()).map(str::to_owned)
}

fn default_model_folder() -> PathBuf {
    let home = std::env::var_os("HOME").unwrap_or_default();
    PathBuf::from(home).join(".cache/velox/models")
}

fn beside_us(program: &str) -> Result<PathBuf, GatewayError> {
    std::env::current_exe()
        .map(|own| own.with_file_name(program))
        .map_err(GatewayError::io("finding our own executable"))
}

fn threads_per_worker(workers: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (cores / workers.max(1)).max(1)
}

fn backend_names() -> [&'static str; 6] {
    ["auto", "metal", "mlx-cuda", "cpu", "mlx-cpu", "reference"]
}

fn parse_backend(name: &str) -> Option<Backend> {
    match name {
        "metal" => Some(Backend::Metal),
        "mlx-cuda" => Some(Backend::MlxCuda),
        "cpu" => Some(Backend::Cpu),
        "mlx-cpu" => Some(Backend::MlxCpu),
        "reference" => Some(Backend::Reference),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(arguments: &[&str]) -> Result<Config, GatewayError> {
        let arguments = ["velox-gateway"].iter().chain(arguments);
        Config::try_from(&Arguments::try_parse_from(arguments).unwrap())
    }

    #[test]
    fn listeners_have_defaults_and_can_be_turned_off() {
        let listen = |arguments: &[&str]| config(arguments).unwrap().listen;
        let default = listen(&[]);
        assert_eq!(default.address, Some("127.0.0.1:50151".parse().unwrap()));
        assert!(default.socket.unwrap().ends_with("gateway.sock"));
        assert_eq!(listen(&["--listen", "none"]).address, None);
        assert_eq!(listen(&["--socket", "none"]).socket, None);
        assert!(config(&["--socket", "none", "--listen", "none"]).is_err());
        assert!(config(&["--listen", "localhost"]).is_err());
    }

    #[test]
    fn limits_are_checked() {
        assert!(config(&["--workers", "0"]).is_err());
        assert!(config(&["--workers", "65"]).is_err());
        assert!(config(&["--threads", "0"]).is_err());
        assert!(config(&["--max-rows", "256"]).is_err());
        let good = config(&["--workers", "2", "--threads", "3", "--backend", "cpu"]).unwrap();
        assert_eq!(
            (good.pool.workers, good.pool.threads_per_worker),
            (2, Some(3))
        );
        assert_eq!(good.pool.backend, Some(Backend::Cpu));
    }

    #[test]
    fn models_are_found_by_path_or_name_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny.gguf");
        std::fs::write(&file, "x").unwrap();
        std::fs::create_dir(folder.path().join("a=b")).unwrap();
        let find = |text: &str, name: &str| resolve_model(text, name, folder.path()).unwrap();

        let by_name = find("tiny", "");
        assert_eq!((by_name.name.as_str(), &by_name.path), ("tiny", &file));
        assert_eq!(find("tiny=other", "").name, "other");
        assert_eq!(find("tiny", "mine").name, "mine");
        assert_eq!(find(file.to_str().unwrap(), "").name, "tiny");
        // The sign is part of a path that exists.
        let odd = folder.path().join("a=b");
        assert_eq!(find(odd.to_str().unwrap(), "").name, "a=b");

        // A path that does not exist is not looked for in the folder.
        let error = resolve_model("./no.gguf", "", folder.path()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "model \"./no.gguf\": no such file or folder"
        );
        for missing in ["nothing", "", "./tiny", "../tiny"] {
            assert!(
                resolve_model(missing, "", folder.path()).is_err(),
                "{missing}"
            );
        }
    }
}
