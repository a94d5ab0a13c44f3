//! `generate`: continues a prompt as it is.

use velox_proto::v1::{GenerateRequest, generate_request::Prompt};

use crate::args::{GenerateArguments, Target};
use crate::cmd::Verdict;
use crate::cmd::render::{self, Ending};
use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::session::{Session, WhenNoneRuns};

/// Runs the command.
pub(crate) async fn run(
    target: &Target,
    arguments: GenerateArguments,
    output: Output,
) -> anyhow::Result<Verdict> {
    let mut interrupt = Interrupt::listen()?;
    let opened = Session::open(target, WhenNoneRuns::Start, output);
    let Some(session) = interrupt.or(opened).await else {
        render::interrupted("", output)?;
        return Ok(Verdict::No);
    };
    let mut session = session?;
    let prompt = arguments
        .prompt
        .or(arguments.prompt_option)
        .unwrap_or_default();
    let request = GenerateRequest {
        model: session.model(),
        prompt: Some(Prompt::Text(prompt)),
        parse_special: arguments.special,
        sampling: Some(render::sampling_options(&arguments.sampling)),
        generation: Some(render::generation_options(&arguments.sampling)),
        policy: session.policy(),
    };
    let deadline = session.deadline();
    let asked = session.client.generate(request, deadline);
    match render::show(asked, &mut interrupt, output).await? {
        Ending::Finished(_) => Ok(Verdict::Yes),
        Ending::Interrupted(_) => Ok(Verdict::No),
    }
}
