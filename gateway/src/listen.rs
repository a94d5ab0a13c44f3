//! Where the gateway can be reached: a Unix socket of this user, and loopback.
//!
//! The socket lies in a folder that only its user can enter, and every peer must have the same uid. TCP is not
//! authenticated here, so anything but loopback is refused.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::{
    DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _,
    PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};

use crate::error::GatewayError;

/// Pause after a failed accept: without file descriptors it would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bits of a mode that are for others than the owner.
const FOR_OTHERS: u32 = 0o077;

/// Returns the socket's default path in the user's runtime folder.
#[must_use]
pub fn default_socket() -> PathBuf {
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder).join("velox"),
        _ => std::env::temp_dir().join(format!("velox-{}", own_uid())),
    };
    folder.join("gateway.sock")
}

/// A listening Unix socket; its file goes with it.
#[derive(Debug)]
pub struct SocketListener {
    listener: UnixListener,
    file: SocketFile,
}

/// Removes the socket's file when dropped; holds the lock that keeps a second gateway away.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    _lock: File,
}

impl SocketListener {
    /// Listens on a path. A socket that nobody answers on is replaced.
    ///
    /// # Errors
    /// [`GatewayError::SocketInUse`], [`GatewayError::SocketUnsafe`] or [`GatewayError::Io`].
    pub fn bind(path: &Path) -> Result<Self, GatewayError> {
        prepare_folder(path)?;
        let lock = lock(path)?;
        remove_stale(path)?;
        let io = |what: &str| GatewayError::io(format!("{what} of {}", path.display()));
        let listener = UnixListener::bind(path).map_err(io("binding"))?;
        let file = SocketFile {
            path: path.to_owned(),
            _lock: lock,
        };
        std::fs::set_permissions(path, Permissions::from_mode(0o600))
            .map_err(io("setting the mode"))?;
        Ok(Self { listener, file })
    }

    /// Returns the connections of this user, and the file to keep while they are served.
    pub fn connections(
        self,
    ) -> (
        impl Stream<Item = std::io::Result<tokio::net::UnixStream>>,
        SocketFile,
    ) {
        let own = own_uid();
        let stream = UnixListenerStream::new(self.listener)
            .then(pause_on_error)
            .filter(move |accepted| match accepted {
                Ok(stream) => is_of(stream, own),
                Err(_) => true,
            });
        (stream, self.file)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "socket could not be removed");
        }
    }
}

/// Listens on a loopback address.
///
/// # Errors
/// [`GatewayError::AddressRefused`] for any other address, [`GatewayError::Io`] if it is taken.
pub async fn bind_loopback(address: SocketAddr) -> Result<TcpListener, GatewayError> {
    if !address.ip().is_loopback() {
        return Err(GatewayError::AddressRefused(address));
    }
    TcpListener::bind(address)
        .await
        .map_err(GatewayError::io(format!("listening on {address}")))
}

/// Returns the connections of a loopback listener.
pub fn loopback_connections(
    listener: TcpListener,
) -> impl Stream<Item = std::io::Result<tokio::net::TcpStream>> {
    TcpListenerStream::new(listener)
        .then(pause_on_error)
        .map(|accepted| {
            accepted.inspect(|stream| {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "connection without TCP_NODELAY");
                }
            })
        })
}

async fn pause_on_error<T>(accepted: std::io::Result<T>) -> std::io::Result<T> {
    if let Err(error) = &accepted {
        tracing::warn!(%error, "accept failed");
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
    accepted
}

fn is_of(stream: &tokio::net::UnixStream, own: u32) -> bool {
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == own => true,
        Ok(peer) => {
            tracing::warn!(uid = peer.uid(), "connection of another user refused");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "connection without credentials refused");
            false
        }
    }
}

fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// Makes the socket's folder, for its user only. A folder that is there must be owned by its user, and must be
/// closed to others unless it is sticky, like the folder for temporary files.
fn prepare_folder(socket: &Path) -> Result<(), GatewayError> {
    let folder = match socket.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let io = |what: &str| GatewayError::io(format!("{what} of folder {}", folder.display()));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(io("creating"))?;
    let metadata = std::fs::metadata(folder).map_err(io("reading the owner"))?;
    let is_shared = metadata.mode() & 0o1000 != 0;
    let why = if is_shared {
        None
    } else if metadata.uid() != own_uid() {
        Some(format!("folder belongs to uid {}", metadata.uid()))
    } else if metadata.mode() & 0o022 != 0 {
        Some(format!(
            "others can write to the folder, its mode is {:o}",
            metadata.mode() & 0o777
        ))
    } else {
        None
    };
    match why {
        None => Ok(()),
        Some(why) => Err(GatewayError::SocketUnsafe {
            path: folder.to_owned(),
            why,
        }),
    }
}

/// Takes the lock beside the socket; it goes with the process, however that ends.
fn lock(socket: &Path) -> Result<File, GatewayError> {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    let path = PathBuf::from(name);
    let io = |what: &str| GatewayError::io(format!("{what} {}", path.display()));
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(no_follow())
        .open(&path)
        .map_err(io("opening"))?;
    let metadata = file.metadata().map_err(io("reading the owner of"))?;
    if metadata.uid() != own_uid() || metadata.mode() & FOR_OTHERS != 0 {
        return Err(GatewayError::SocketUnsafe {
            path,
            why: "lock file is not this user's alone".to_owned(),
        });
    }
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(GatewayError::SocketInUse(socket.to_owned())),
        Err(std::fs::TryLockError::Error(source)) => Err(io("locking")(source)),
    }
}

fn no_follow() -> i32 {
    i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or_default()
}

/// Removes a socket that nobody answers on. Whatever else lies there is left alone.
fn remove_stale(socket: &Path) -> Result<(), GatewayError> {
    let metadata = match std::fs::symlink_metadata(socket) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(GatewayError::io(format!("reading {}", socket.display()))(
                source,
            ));
        }
    };
    if !metadata.file_type().is_socket() || metadata.uid() != own_uid() {
        return Err(GatewayError::SocketUnsafe {
            path: socket.to_owned(),
            why: "something that is not this user's socket is in the way".to_owned(),
        });
    }
    if std::os::unix::net::UnixStream::connect(socket).is_ok() {
        return Err(GatewayError::SocketInUse(socket.to_owned()));
    }
    std::fs::remove_file(socket).map_err(GatewayError::io(format!(
        "removing the stale {}",
        socket.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_the_user_s_alone_and_goes_with_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/gateway.sock");
        let listener = SocketListener::bind(&path).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_second_gateway_is_refused_and_the_first_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gateway.sock");
        let first = SocketListener::bind(&path).unwrap();
        let error = SocketListener::bind(&path).unwrap_err();
        assert!(matches!(error, GatewayError::SocketInUse(_)), "{error}");
        let (connections, _file) = first.connections();
        let mut connections = std::pin::pin!(connections);
        let _client = tokio::net::UnixStream::connect(&path).await.unwrap();
        assert!(connections.next().await.unwrap().is_ok());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gateway.sock");
        // Dropping the listener of the standard library leaves its file, as a crash does.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(SocketListener::bind(&path).unwrap());

        std::fs::write(&path, "precious").unwrap();
        let error = SocketListener::bind(&path).unwrap_err();
        assert!(
            matches!(error, GatewayError::SocketUnsafe { .. }),
            "{error}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn a_folder_that_others_can_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        let error = SocketListener::bind(&open.join("gateway.sock")).unwrap_err();
        assert!(
            matches!(error, GatewayError::SocketUnsafe { .. }),
            "{error}"
        );
    }

    #[tokio::test]
    async fn only_loopback_is_listened_on() {
        for address in ["0.0.0.0:0", "192.168.1.1:0", "[::]:0"] {
            let error = bind_loopback(address.parse().unwrap()).await.unwrap_err();
            assert!(matches!(error, GatewayError::AddressRefused(_)), "{error}");
        }
        let listener = bind_loopback("127.0.0.1:0".parse().unwrap()).await.unwrap();
        assert_ne!(listener.local_addr().unwrap().port(), 0);
    }
}
