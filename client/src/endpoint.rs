//! Where a gateway listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::ClientError;

/// Loopback address that a gateway listens on by default.
pub const DEFAULT_ADDRESS: &str = "127.0.0.1:50151";

/// Name of the socket in the runtime folder.
const SOCKET_NAME: &str = "gateway.sock";

/// Most characters of an endpoint in the name of its log: a file name has room for 255 bytes.
const MAX_LOG_NAME_CHARS: usize = 128;

/// Address of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// `host:port`, without TLS: loopback only.
    Tcp(String),
}

impl Endpoint {
    /// Returns the endpoints to try when none is named: the user's socket, then loopback.
    #[must_use]
    pub fn default_candidates() -> Vec<Self> {
        vec![
            Self::Unix(default_socket()),
            Self::Tcp(DEFAULT_ADDRESS.to_owned()),
        ]
    }

    /// Returns the log of a gateway that stays and was started for this endpoint.
    ///
    /// It lies in the user's own folder, never beside the socket: it is emptied at each start.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        let name = match self {
            Self::Unix(path) if *path == default_socket() => "gateway.log".to_owned(),
            Self::Unix(path) => format!("gateway-{}.log", plain(&path.to_string_lossy())),
            Self::Tcp(address) => format!("gateway-{}.log", plain(address)),
        };
        runtime_folder().join(name)
    }
}

/// Returns the folder that the gateway keeps its socket in: the user's runtime folder, else one per uid in the
/// folder for temporary files.
#[must_use]
pub fn runtime_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder).join("velox"),
        _ => std::env::temp_dir().join(format!("velox-{}", rustix::process::getuid().as_raw())),
    }
}

/// Returns the path of the user's socket.
#[must_use]
pub fn default_socket() -> PathBuf {
    runtime_folder().join(SOCKET_NAME)
}

/// Makes part of a file name from the end of a text, which differs most.
fn plain(text: &str) -> String {
    let skipped = text.chars().count().saturating_sub(MAX_LOG_NAME_CHARS);
    text.chars()
        .skip(skipped)
        .map(|char| match char {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' => char,
            _ => '-',
        })
        .collect()
}

impl FromStr for Endpoint {
    type Err = ClientError;

    fn from_str(text: &str) -> Result<Self, ClientError> {
        let invalid = || ClientError::InvalidEndpoint {
            text: text.to_owned(),
        };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() {
                Err(invalid())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        let address = text
            .strip_prefix("http://")
            .unwrap_or(text)
            .trim_end_matches('/');
        let (host, port) = address.rsplit_once(':').ok_or_else(invalid)?;
        if host.is_empty() || host.contains('/') || port.parse::<u16>().is_err() {
            return Err(invalid());
        }
        Ok(Self::Tcp(address.to_owned()))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(address) => write!(formatter, "http://{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_survive_the_round_trip() {
        for text in [
            "unix:/run/user/1/velox/gateway.sock",
            "http://127.0.0.1:50151",
            "http://[::1]:7",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        assert_eq!(
            "localhost:50151".parse::<Endpoint>().unwrap(),
            Endpoint::Tcp("localhost:50151".to_owned())
        );
        assert_eq!(
            "unix:///run/x.sock".parse::<Endpoint>().unwrap(),
            Endpoint::Unix("/run/x.sock".into())
        );
    }

    #[test]
    fn each_endpoint_has_its_own_log_in_the_runtime_folder() {
        let name = |endpoint: Endpoint| {
            let log = endpoint.log_file();
            assert_eq!(log.parent(), Some(runtime_folder().as_path()));
            log.file_name().unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(name(Endpoint::Unix(default_socket())), "gateway.log");
        assert_eq!(
            name(Endpoint::Unix("/run/a/x.sock".into())),
            "gateway--run-a-x.sock.log"
        );
        assert_eq!(
            name(Endpoint::Tcp("[::1]:7".to_owned())),
            "gateway----1--7.log"
        );
        assert!(name(Endpoint::Unix("/x".repeat(200).into())).len() < 200);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "unix:",
            "https://example.org:1",
            "localhost",
            "http://h:99999",
            ":50151",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
