package model

import "fmt"

// MostDraft is the largest number of tokens of a draft.
const MostDraft = 64

// DraftStats has the work of [Decoder.Verify] and [Decoder.Accept].
type DraftStats struct {
	Passes   int // runs of the drafts' graph
	Tokens   int // of drafts
	Accepted int // accepted tokens of drafts
}

// verified is the result of the last Verify after each token that it appended to a sequence.
type verified struct {
	rows   int       // the number of these tokens; 0: none, or the sequence has changed since
	logits []float32 // (rows, vocabulary); nil: not downloaded
	chosen []int     // with Greedy or Choices
	u      []float64 // the random numbers of chosen
	spare  []float64 // unused random numbers: the next ones
}

// Verify is one pass for drafts (speculative decoding: Leviathan et al., arXiv:2211.17192, section 2). It appends
// tokens[i] to sequence i: a certain token, and up to [Options].Draft guesses of the next ones. [Decoder.LogitsAfter]
// and [Decoder.ChosenAfter] return the model's result after each of the tokens; no other logits or choices are kept.
// [Decoder.Accept] then removes the wrong guesses. No tokens leave a sequence unchanged. After an error every
// sequence is unchanged.
func (d *Decoder) Verify(tokens [][]int) error {
	for i, ts := range tokens {
		if n := len(ts) - 1; n > d.options.Draft {
			return fmt.Errorf("%w: a draft of %d tokens for sequence %d, and Draft is %d", ErrConfig, n, i, d.options.Draft)
		}
	}
	if err := d.check(tokens); err != nil {
		return err
	}
	p, todo := d.verify, 0
	if p == nil {
		return fmt.Errorf("%w: Draft is 0", ErrConfig)
	}
	for i, ts := range tokens {
		v := &d.verified[i]
		p.counts[i], v.u = len(ts), v.u[:0]
		todo += len(ts)
		for range ts {
			d.draw(i)
			v.u = append(v.u, d.u[i])
		}
	}
	if todo == 0 {
		return nil
	}
	if err := d.run(p, tokens); err != nil {
		return err
	}
	d.stats.Draft.Passes++
	for i, n := range p.counts {
		d.verified[i].rows = n
		d.stats.Draft.Tokens += max(n-1, 0)
	}
	return nil
}

// LogitsAfter returns the logits after token j of those that the last Verify appended to sequence i; nil if there are
// none, or if the sequence has changed since.
func (d *Decoder) LogitsAfter(i, j int) []float32 {
	v, width := &d.verified[i], d.config.VocabSize
	if j < 0 || j >= v.rows || v.logits == nil {
		return nil
	}
	return v.logits[j*width : (j+1)*width : (j+1)*width]
}

// ChosenAfter returns the token that [Options].Greedy or Choices choose after that token; -1: none.
func (d *Decoder) ChosenAfter(i, j int) int {
	v := &d.verified[i]
	if j < 0 || j >= v.rows || !d.options.chooses() {
		return -1
	}
	return v.chosen[j]
}

// Accept keeps the first tokens, at least one, of those that the last Verify appended to sequence i, and drops the
// others. [Decoder.Logits] and [Decoder.Chosen] then follow the kept tokens, and random numbers are as if the others
// had never been appended.
func (d *Decoder) Accept(i, tokens int) error {
	if i < 0 || i >= len(d.lengths) {
		return fmt.Errorf("%w: sequence %d of %d", ErrConfig, i, len(d.lengths))
	}
	v := &d.verified[i]
	if tokens < 1 || tokens > v.rows {
		return fmt.Errorf("%w: %d of %d tokens that were verified of sequence %d", ErrConfig, tokens, v.rows, i)
	}
	logits, chosen, wrong := d.LogitsAfter(i, tokens-1), d.ChosenAfter(i, tokens-1), v.rows-tokens
	if wrong > 0 {
		if err := d.Truncate(i, d.lengths[i]-wrong); err != nil {
			return err
		}
	}
	v.rows = 0
	d.logits[i], d.chosen[i], d.u[i] = logits, chosen, v.u[tokens-1]
	v.spare = append(v.u[tokens:], v.spare...)
	v.u = nil // spare has its memory
	d.stats.Draft.Accepted += tokens - 1
	d.stats.Decode.Tokens -= wrong
	return nil
}

// keepVerified stores the part of a run that Verify needs.
func (d *Decoder) keepVerified(p *pass, logits []float32, chosen []int) {
	width := d.config.VocabSize
	for i, n := range p.counts {
		v, first := &d.verified[i], p.first[i]
		v.chosen = v.chosen[:0]
		if logits != nil {
			v.logits = logits[first*width : (first+n)*width]
		}
		for j := range n {
			switch {
			case chosen != nil:
				v.chosen = append(v.chosen, chosen[first+j])
			case d.options.chooses():
				row := logits[(first+j)*width : (first+j+1)*width]
				v.chosen = append(v.chosen, d.choice(i).Choose(row, v.u[j]))
			}
		}
	}
}

// fillVerified writes how the drafts' graph chooses the tokens after its rows.
func (d *Decoder) fillVerified(p *pass) {
	g := p.graph.gpu
	for i, n := range p.counts {
		for j := range n {
			row := p.first[i] + j
			g.choices[row], g.randoms[row] = d.options.Choices[i], d.verified[i].u[j]
		}
	}
}
