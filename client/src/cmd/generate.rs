//! `generate`: continues a prompt as it is.

use velox_proto::v1::{GenerateRequest, generate_request::Prompt};

use crate::args::{GenerateArguments, Target};
use crate::cmd::Verdict;
use crate::cmd::render::{self, Ending};
use crate::output::Output;
use crate::session::{Session, WhenNoneRuns};

/// Runs the command.
pub(crate) async fn run(
    target: &Target,
    arguments: GenerateArguments,
    output: Output,
) -> anyhow::Result<Verdict> {
    let mut session = Session::open(target, WhenNoneRuns::Start, output).await?;
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
    let answer = session.client.generate(request, deadline).await?;
    match render::show(answer, output).await? {
        Ending::Finished(_) => Ok(Verdict::Yes),
        Ending::Interrupted(_) => Ok(Verdict::No),
    }
}
