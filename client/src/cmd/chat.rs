//! `chat`: one turn, or a conversation.

use std::io::{BufRead as _, IsTerminal as _};

use velox_client::error::ClientError;
use velox_proto::v1::{ChatMessage, ChatRequest};

use crate::args::{ChatArguments, Target};
use crate::cmd::Verdict;
use crate::cmd::render::{self, Ending};
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::session::{Session, WhenNoneRuns};

/// Runs the command.
pub(crate) async fn run(
    target: &Target,
    arguments: ChatArguments,
    output: Output,
) -> anyhow::Result<Verdict> {
    let mut interrupt = Interrupt::listen()?;
    let opened = Session::open(target, WhenNoneRuns::Start, output);
    let Some(session) = interrupt.or(opened).await else {
        render::interrupted("", output)?;
        return Ok(Verdict::No);
    };
    let mut conversation = Conversation::new(session?, interrupt, arguments.clone());
    match arguments.prompt.or(arguments.prompt_option) {
        Some(prompt) => match conversation.turn(prompt, output).await? {
            Ending::Finished(_) => Ok(Verdict::Yes),
            Ending::Interrupted(_) => Ok(Verdict::No),
        },
        None => interactive(conversation, output).await,
    }
}

/// The turns so far; the gateway keeps none.
struct Conversation {
    session: Session,
    interrupt: Interrupt,
    arguments: ChatArguments,
    messages: Vec<ChatMessage>,
}

impl Conversation {
    fn new(session: Session, interrupt: Interrupt, arguments: ChatArguments) -> Self {
        let mut conversation = Self {
            session,
            interrupt,
            arguments,
            messages: Vec::new(),
        };
        conversation.clear();
        conversation
    }

    fn clear(&mut self) {
        self.messages = self
            .arguments
            .system
            .iter()
            .map(|text| message("system", text))
            .collect();
    }

    /// Says something and shows the answer; what was refused is not kept.
    async fn turn(&mut self, prompt: String, output: Output) -> anyhow::Result<Ending> {
        self.messages.push(message("user", &prompt));
        let request = ChatRequest {
            model: self.session.model(),
            messages: self.messages.clone(),
            sampling: Some(render::sampling_options(&self.arguments.sampling)),
            generation: Some(render::generation_options(&self.arguments.sampling)),
            policy: self.session.policy(),
            template_arguments_json: String::new(),
        };
        let deadline = self.session.deadline();
        let asked = self.session.client.chat(request, deadline);
        let shown = render::show(asked, &mut self.interrupt, output).await;
        match &shown {
            Ok(Ending::Finished(text) | Ending::Interrupted(text)) => {
                self.messages.push(message("assistant", text));
            }
            Err(_) => {
                self.messages.pop();
            }
        }
        shown
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
    }
}

/// Reads prompts until end of file. Ctrl-C ends an answer, not the chat; where nobody types it ends the chat when
/// there is no answer to end.
async fn interactive(mut conversation: Conversation, output: Output) -> anyhow::Result<Verdict> {
    let on_terminal = std::io::stdin().is_terminal();
    if on_terminal {
        output.note("Ctrl-C ends an answer, Ctrl-D the chat; /clear forgets the conversation.");
    }
    let mut reader = Reader::new()?;
    loop {
        let mut reading = tokio::task::spawn_blocking(move || {
            let line = reader.next();
            (reader, line)
        });
        let (returned, line) = loop {
            match conversation.interrupt.or(&mut reading).await {
                Some(read) => break read?,
                // The editor has the terminal and its keys.
                None if on_terminal => {}
                None => {
                    render::interrupted("", output)?;
                    return Ok(Verdict::No);
                }
            }
        };
        reader = returned;
        let Some(line) = line? else {
            return Ok(Verdict::Yes);
        };
        match line.trim() {
            "" => {}
            "/clear" => conversation.clear(),
            "/exit" | "/quit" => return Ok(Verdict::Yes),
            prompt => match conversation.turn(prompt.to_owned(), output).await {
                Ok(Ending::Finished(_)) => {}
                Ok(Ending::Interrupted(_)) => output.note("\n[interrupted]"),
                // A refusal concerns this turn only.
                Err(error) => match error.downcast_ref::<ClientError>() {
                    Some(refused @ ClientError::Refused(_)) => output.note(&format!("[{refused}]")),
                    _ => return Err(error),
                },
            },
        }
    }
}

/// A line editor on a terminal, plain lines elsewhere.
enum Reader {
    Editor(Box<rustyline::DefaultEditor>),
    Lines,
}

impl Reader {
    fn new() -> anyhow::Result<Self> {
        if std::io::stdin().is_terminal() {
            Ok(Self::Editor(Box::new(rustyline::DefaultEditor::new()?)))
        } else {
            Ok(Self::Lines)
        }
    }

    fn next(&mut self) -> anyhow::Result<Option<String>> {
        use rustyline::error::ReadlineError;
        match self {
            Self::Lines => {
                let mut line = String::new();
                let count = std::io::stdin().lock().read_line(&mut line)?;
                Ok((count > 0).then_some(line))
            }
            Self::Editor(editor) => match editor.readline("> ") {
                Ok(line) => {
                    editor.add_history_entry(line.as_str())?;
                    Ok(Some(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(error) => Err(error.into()),
            },
        }
    }
}
