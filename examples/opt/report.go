package main

import (
	"encoding/json"
	"io"

	"gorgonia.org/leanattention/examples/opt/model"
)

// reportJSON is the document that -json writes to standard output, once, at the
// end, also after an interrupt. Texts that are no UTF-8 have U+FFFD where they are
// not.
type reportJSON struct {
	Model      string          `json:"model"`                // the folder, as -model has it, or "the shipped model"
	Device     string          `json:"device"`               // "cpu", or the GPU
	Texts      []textJSON      `json:"texts,omitempty"`      // of each prompt, in their order
	Perplexity *perplexityJSON `json:"perplexity,omitempty"` // with -perplexity
	Stats      statsJSON       `json:"stats"`
}

// textJSON is a prompt and what the model added to it.
type textJSON struct {
	Prompt       string       `json:"prompt"`
	PromptTokens []int        `json:"prompt_tokens"`
	Cached       int          `json:"cached_tokens"`      // of PromptTokens, those that -prompt-cache had
	Shared       int          `json:"shared_tokens"`      // of PromptTokens, those that a text before has read
	Text         string       `json:"text"`               // without the stop text that ended it
	Tokens       []int        `json:"tokens"`             // as they were chosen, those of the stop text included, the end of text not
	Reason       string       `json:"reason"`             // why it ended: "eos", "stop", "length" (-n), "context" or "interrupt"
	Context      int          `json:"context,omitempty"`  // with Reason "context": the model's positions, of which none is left
	Logprobs     []choiceJSON `json:"logprobs,omitempty"` // with -logprobs, of each of Tokens
}

// choiceJSON is a token that was chosen, and the most likely ones in its place, from
// the most likely one on.
type choiceJSON struct {
	tokenJSON
	Top []tokenJSON `json:"top"`
}

// tokenJSON is a token and the natural logarithm of its probability. The
// probability is the model's: softmax of the logits, whatever -temperature, -top-k
// and -top-p make of it.
type tokenJSON struct {
	Token   int     `json:"token"`
	Text    string  `json:"text"` // of the token alone: U+FFFD for a part of a character
	Logprob float64 `json:"logprob"`
}

// perplexityJSON is exp of the mean of -log p over the tokens of a text that have
// one before them in their window.
type perplexityJSON struct {
	Value    float64 `json:"value"`
	Tokens   int     `json:"tokens"`   // that the mean is over
	Of       int     `json:"of"`       // tokens of the text
	Windows  int     `json:"windows"`  // begun
	Window   int     `json:"window"`   // most tokens of a window
	Stride   int     `json:"stride"`   // from the beginning of a window to that of the next one
	Complete bool    `json:"complete"` // false: interrupted, and the value is that of what was read
}

// statsJSON is what -stats tells. Times are in seconds.
type statsJSON struct {
	Seed    *uint64    `json:"seed,omitempty"`  // -seed that makes the same texts again; none where the most likely tokens were taken
	Load    float64    `json:"load"`            // until the weights were there
	Build   float64    `json:"build"`           // graphs, and copies of weights
	First   float64    `json:"first"`           // until a first prompt was read, from then on
	Prefill phaseJSON  `json:"prefill"`         // prompts
	Decode  phaseJSON  `json:"decode"`          // tokens that were chosen
	Draft   *draftJSON `json:"draft,omitempty"` // with -draft

	Exchange *exchangeJSON `json:"exchange,omitempty"` // of several GPUs or ranks that sum
}

// exchangeJSON is what GPUs or ranks sum in a run of decode.
type exchangeJSON struct {
	Sums    int     `json:"sums"`
	Bytes   int     `json:"bytes"`   // of each
	Seconds float64 `json:"seconds"` // that all of them take by themselves
}

// draftJSON is what drafts were good for.
type draftJSON struct {
	Tokens   int `json:"tokens"`   // guessed
	Accepted int `json:"accepted"` // of these; they are tokens of decode, too
	Runs     int `json:"runs"`     // of decode's, those with guesses
}

// phaseJSON is what one of the two graphs did.
type phaseJSON struct {
	Tokens          int     `json:"tokens"`
	Runs            int     `json:"runs"` // of the graph
	Seconds         float64 `json:"seconds"`
	TokensPerSecond float64 `json:"tokens_per_second"` // 0 without tokens
	Attention       float64 `json:"attention"`         // seconds in it
	Bytes           int64   `json:"bytes"`             // that had to be read; 0: not known
}

func (l *loaded) newReport() *reportJSON {
	s := l.decoder.Stats()
	var draft *draftJSON
	if l.options.draft {
		draft = &draftJSON{s.Draft.Tokens, s.Draft.Accepted, s.Draft.Passes}
	}
	var exchange *exchangeJSON
	if x := l.exchange; x.Sums > 0 {
		exchange = &exchangeJSON{x.Sums, x.Bytes, x.Time.Seconds()}
	}
	return &reportJSON{
		Model: name(l.options.model), Device: l.device(),
		Stats: statsJSON{
			Seed: l.options.seed(), Load: l.first.load.Seconds(), Build: l.first.build.Seconds(), First: l.first.prompt.Seconds(),
			Prefill: newPhase(s.Prefill), Decode: newPhase(s.Decode), Draft: draft, Exchange: exchange,
		},
	}
}

func newPhase(p model.Phase) phaseJSON {
	j := phaseJSON{Tokens: p.Tokens, Runs: p.Passes, Seconds: p.Time.Seconds(), Attention: p.Attention.Seconds(), Bytes: p.Bytes}
	if p.Time > 0 {
		j.TokensPerSecond = float64(p.Tokens) / j.Seconds
	}
	return j
}

func (l *loaded) newText(prompt string, ids []int, c *continuation) textJSON {
	for i := range c.logprobs {
		choice := &c.logprobs[i]
		choice.Text = l.tokenizer.Decode([]int{choice.Token})
		for j := range choice.Top {
			choice.Top[j].Text = l.tokenizer.Decode([]int{choice.Top[j].Token})
		}
	}
	tokens := c.tokens
	if tokens == nil {
		tokens = []int{} // a list in JSON, too
	}
	context := 0
	if c.reason == endContext {
		context = l.config.MaxPositions
	}
	return textJSON{Prompt: prompt, PromptTokens: ids, Text: c.text.String(), Tokens: tokens, Reason: c.reason, Context: context, Logprobs: c.logprobs}
}

func (r *reportJSON) write(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
