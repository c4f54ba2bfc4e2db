package main

import (
	"encoding/json"
	"io"

	"gorgonia.org/leanattention/examples/opt/model"
)

// reportJSON is the document that -json writes to standard output, once, at the end, also after an interrupt. Invalid
// UTF-8 in texts becomes U+FFFD.
type reportJSON struct {
	Model      string          `json:"model"`                // value of -model, or "the shipped model"
	Device     string          `json:"device"`               // "cpu", or the GPU
	Texts      []textJSON      `json:"texts,omitempty"`      // one for each prompt, in order
	Perplexity *perplexityJSON `json:"perplexity,omitempty"` // with -perplexity
	Stats      statsJSON       `json:"stats"`
}

// textJSON is a prompt and its continuation.
type textJSON struct {
	Prompt       string       `json:"prompt"`
	PromptTokens []int        `json:"prompt_tokens"`
	Cached       int          `json:"cached_tokens"`      // tokens of PromptTokens from -prompt-cache
	Shared       int          `json:"shared_tokens"`      // tokens of PromptTokens that an earlier text has read
	Text         string       `json:"text"`               // without the stop text that ended it
	Tokens       []int        `json:"tokens"`             // as chosen, with the stop text's tokens and without the end of text
	Reason       string       `json:"reason"`             // why it ended: "eos", "stop", "length" (-n), "context" or "interrupt"
	Context      int          `json:"context,omitempty"`  // with Reason "context": the model's positions, of which none is left
	Logprobs     []choiceJSON `json:"logprobs,omitempty"` // with -logprobs, one for each of Tokens
}

// choiceJSON is a chosen token, and the most likely tokens in its place, the most likely first.
type choiceJSON struct {
	tokenJSON
	Top []tokenJSON `json:"top"`
}

// tokenJSON is a token and the natural logarithm of its probability: the model's softmax of the logits, without
// -temperature, -top-k and -top-p.
type tokenJSON struct {
	Token   int     `json:"token"`
	Text    string  `json:"text"` // of the token alone: U+FFFD for a part of a character
	Logprob float64 `json:"logprob"`
}

// perplexityJSON is exp of the mean of -log p over the tokens of a text that have
// one before them in their window.
type perplexityJSON struct {
	Value    float64 `json:"value"`
	Tokens   int     `json:"tokens"`   // tokens of the mean
	Of       int     `json:"of"`       // tokens of the text
	Windows  int     `json:"windows"`  // windows begun
	Window   int     `json:"window"`   // most tokens of a window
	Stride   int     `json:"stride"`   // tokens between the beginnings of two windows
	Complete bool    `json:"complete"` // false: interrupted, and the value is that of the tokens read
}

// statsJSON is the output of -stats. Times are in seconds.
type statsJSON struct {
	Seed    *uint64    `json:"seed,omitempty"`  // -seed that makes the same texts again; none for greedy texts
	Load    float64    `json:"load"`            // until the weights are loaded
	Build   float64    `json:"build"`           // graphs, and copies of weights
	First   float64    `json:"first"`           // until a first prompt is read, after Build
	Prefill phaseJSON  `json:"prefill"`         // prompts
	Decode  phaseJSON  `json:"decode"`          // chosen tokens
	Draft   *draftJSON `json:"draft,omitempty"` // with -draft

	Exchange *exchangeJSON `json:"exchange,omitempty"` // with several GPUs or ranks that sum
}

// exchangeJSON describes the sums of GPUs or ranks in a run of decode.
type exchangeJSON struct {
	Sums    int     `json:"sums"`
	Bytes   int     `json:"bytes"`   // of each sum
	Seconds float64 `json:"seconds"` // time of all sums by themselves
}

// draftJSON has the results of drafts.
type draftJSON struct {
	Tokens   int `json:"tokens"`   // guessed tokens
	Accepted int `json:"accepted"` // accepted guesses, which also are tokens of decode
	Runs     int `json:"runs"`     // runs of decode with guesses
}

// phaseJSON is the work of one of the two graphs.
type phaseJSON struct {
	Tokens          int     `json:"tokens"`
	Runs            int     `json:"runs"` // of the graph
	Seconds         float64 `json:"seconds"`
	TokensPerSecond float64 `json:"tokens_per_second"` // 0 without tokens
	Attention       float64 `json:"attention"`         // seconds of attention
	Bytes           int64   `json:"bytes"`             // bytes that had to be read; 0: not known
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
		tokens = []int{} // an empty list in JSON, not null
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
