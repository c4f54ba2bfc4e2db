package decoder

import (
	"cmp"
	"time"
)

// pace bounds the rows of prompts in steps that give other texts their next tokens, so that such a step takes about Options.Gap times as
// long as a step without prompts. The bound follows the times of the steps before.
type pace struct {
	most    float64 // Options.Gap; 0: no bound
	usual   float64 // seconds of a step without prompts; 0: not known
	singles int     // texts of that step
	bound   float64 // rows; 0: none was needed yet
	steps   int     // that told usual: one without prompts, or guesses of several with prompts
}

const (
	fewestRows = 4   // the least bound: prompts are always read
	firstRows  = 16  // the first bound
	growth     = 3   // most growth of the bound after a step
	guesses    = 8   // steps with prompts that tell as much as one without
	aim        = 0.9 // of the time that Gap leaves for rows of prompts
)

// rows returns the most rows of prompts in a step of at most limit rows that gives singles texts their next tokens.
func (p *pace) rows(singles, limit int) int {
	limit -= singles
	if p.most == 0 || singles == 0 {
		return limit
	}
	if p.bound == 0 {
		p.bound = firstRows
	}
	p.bound = min(p.bound, float64(limit))
	return min(limit, max(fewestRows, int(p.bound)))
}

// took tells the time of a step.
func (p *pace) took(singles, prompts int, d time.Duration) {
	s := d.Seconds()
	if p.most == 0 || singles == 0 || s <= 0 {
		return
	}
	if more := singles - p.singles; more != 0 && p.usual > 0 && s > p.usual && prompts+more > 0 { // a text's row takes as long as a prompt's
		p.usual = max(p.usual+(s-p.usual)*float64(more)/float64(prompts+more), p.usual/2)
	}
	p.singles = singles
	before, bound := p.usual, cmp.Or(p.bound, firstRows)
	switch {
	case before == 0:
		p.usual = s
	case s < before:
		p.usual += (s - before) / 2
		bound *= p.usual / before
	case prompts == 0:
		p.usual += (s - before) / 8
		bound *= p.usual / before
	}
	if p.steps++; prompts == 0 {
		p.steps = guesses
	}
	if p.bound = bound; prompts == 0 || p.steps < guesses {
		return
	}
	change := float64(growth)
	if over := s/p.usual - 1; over > 0 {
		change = min(change, aim*(p.most-1)/over)
	}
	switch rows := float64(prompts); {
	case change >= 1:
		p.bound = max(bound, rows*change)
	case 2*rows > bound: // not the few last rows of a prompt
		p.bound = rows * change
	}
}
