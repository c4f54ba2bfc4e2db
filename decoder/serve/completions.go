package serve

import (
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"time"
)

// completion is the answer of /v1/completions, and each event of a stream.
type completion struct {
	ID      string             `json:"id"`
	Object  string             `json:"object"`
	Created int64              `json:"created"`
	Model   string             `json:"model"`
	Choices []completionChoice `json:"choices"`
	Usage   *usage             `json:"usage,omitempty"`
}

type completionChoice struct {
	Text         string              `json:"text"`
	Index        int                 `json:"index"`
	LogProbs     *completionLogProbs `json:"logprobs"`
	FinishReason *string             `json:"finish_reason"`
}

// completionLogProbs has an element for each token in each list.
type completionLogProbs struct {
	Tokens        []string             `json:"tokens"`
	TokenLogProbs []float64            `json:"token_logprobs"`
	TopLogProbs   []map[string]float64 `json:"top_logprobs"`
	TextOffset    []int                `json:"text_offset"` // bytes of the choice before the token
}

func (s *Server) complete(w http.ResponseWriter, r *http.Request, body []byte) error {
	c := s.newCommon()
	c.request.Tokens = 16
	var prompts [][]int
	fields := c.fields(s)
	fields["best_of"] = within(&c.best, 1, s.options.Texts)
	fields["logprobs"] = within(&c.logprobs, 0, mostLogProbs)
	fields["prompt"] = func(raw json.RawMessage) (err error) {
		prompts, err = s.readPrompts(raw)
		return err
	}
	if err := fields.read(body, ""); err != nil {
		return err
	}
	switch {
	case prompts == nil:
		return wrong("prompt", "the field is missing")
	case c.best > 0 && c.best < c.n:
		return wrong("best_of", "%d is less than n, which is %d", c.best, c.n)
	case c.best > c.n && c.stream:
		return wrong("best_of", "a stream has all choices that are computed: %d is more than n, which is %d", c.best, c.n)
	}
	run, err := s.start(r, c, prompts)
	if err != nil {
		return err
	}
	defer run.end()
	answer := completion{ID: newID("cmpl-"), Object: "text_completion", Created: time.Now().Unix(), Model: s.options.Model, Choices: []completionChoice{}}
	if c.stream {
		offsets := make([]int, len(run.texts))
		return run.stream(w, nil, func(index int, p *piece) any {
			choice := completionChoice{Text: p.text, Index: index, FinishReason: p.finish}
			if c.logprobs >= 0 && p.token != nil {
				choice.LogProbs = s.completionLogProbs([]piece{*p}, c.logprobs, offsets[index])
			}
			offsets[index] += len(p.text)
			e := answer
			e.Choices = []completionChoice{choice}
			return e
		}, func(u *usage) any {
			e := answer
			e.Usage = u
			return e
		})
	}
	all, err := run.collect()
	if err != nil {
		return err
	}
	u := run.usage()
	answer.Usage = &u
	for i := range prompts {
		choices := all[i*c.best : (i+1)*c.best]
		if c.best > c.n {
			slices.SortStableFunc(choices, func(x, y *collected) int { return cmp.Compare(y.mean(), x.mean()) })
		}
		for j, x := range choices[:c.n] {
			choice := completionChoice{Text: x.text.String(), Index: i*c.n + j, FinishReason: &x.finish}
			if c.logprobs >= 0 {
				choice.LogProbs = s.completionLogProbs(x.pieces, c.logprobs, 0)
			}
			answer.Choices = append(answer.Choices, choice)
		}
	}
	return writeJSON(w, answer)
}

func (s *Server) completionLogProbs(pieces []piece, most, offset int) *completionLogProbs {
	l := &completionLogProbs{Tokens: []string{}, TokenLogProbs: []float64{}, TopLogProbs: []map[string]float64{}, TextOffset: []int{}}
	for _, p := range pieces {
		if t := p.token; t != nil {
			top := map[string]float64{}
			for _, x := range t.Likely[:min(most, len(t.Likely))] {
				name := s.tokenText(x.ID)
				if _, ok := top[name]; !ok { // the more likely one of two tokens with one text
					top[name] = finite(x.LogProb)
				}
			}
			l.Tokens, l.TokenLogProbs = append(l.Tokens, s.tokenText(t.ID)), append(l.TokenLogProbs, finite(t.LogProb))
			l.TopLogProbs, l.TextOffset = append(l.TopLogProbs, top), append(l.TextOffset, offset)
		}
		offset += len(p.text)
	}
	return l
}
