package tokenizer

import (
	"math"
	"unicode/utf8"
)

// unigram is the Unigram model: a word becomes the sequence of tokens with the largest sum of scores.
type unigram struct {
	tokens     *trie
	scores     []float64 // by id
	unk        int       // -1: none
	unkScore   float64
	byteTokens *[256]int32    // tokens of the bytes of unknown characters; nil: unknown characters become unk
	names      map[string]int // tokens that a run of unknown characters can match; nil: none
	single     bool           // sums are in float32, as in SentencePiece
}

// step is the best segmentation found so far of a prefix of a word.
type step struct {
	score float64
	id    int32 // last token; -1: the unknown token, if unk is -1; noWay: no segmentation
	begin int32 // beginning of the last token
}

const noWay = -2

// mostSum is the magnitude of a float32 sum from which the sums are rebased to 0, as in SentencePiece since 0.2.2.
const mostSum = 100000

// unkPenalty is the lowest score minus the score of an unknown character.
const unkPenalty = 10

func (u *unigram) encode(e *encoder, word string) bool {
	if cap(e.best) <= len(word) {
		e.best = make([]step, 2*len(word)+1)
	}
	best := e.best[:len(word)+1]
	for i := range best {
		best[i] = step{id: noWay}
	}
	best[0].id = 0
	farthest := 0 // largest end of a token
	offer := func(end int, s step) {
		if u.single {
			s.score = float64(float32(s.score))
		}
		if best[end].id == noWay || s.score > best[end].score {
			best[end] = s
		}
		farthest = max(farthest, end)
	}
	for at := 0; at < len(word); {
		_, size := utf8.DecodeRuneInString(word[at:])
		if u.single && math.Abs(best[at].score) > mostSum {
			// Rebase the sums to 0 at this position.
			for i, here := at, best[at].score; i <= farthest; i++ {
				if best[i].id != noWay {
					best[i].score = float64(float32(best[i].score - here))
				}
			}
		}
		here, whole := best[at].score, false
		node := int32(0)
		for end := at; end < len(word); {
			if node = u.tokens.step(node, word[end]); node < 0 {
				break
			}
			end++
			if id := u.tokens.nodes[node].value; id >= 0 {
				offer(end, step{here + u.scores[id], id, int32(at)})
				whole = whole || end == at+size
			}
		}
		if !whole {
			offer(at+size, step{here + u.unkScore, int32(u.unk), int32(at)})
		}
		at += size
	}
	// Collect the tokens in reverse order, and then reverse the tokens. Adjacent unknown characters are one unknown token.
	begin := len(e.ids)
	for end := len(word); end > 0; {
		start := int(best[end].begin)
		if id := int(best[end].id); id != u.unk {
			e.ids = append(e.ids, id)
			end = start
			continue
		}
		for start > 0 && int(best[start].id) == u.unk {
			start = int(best[start].begin)
		}
		id, ok := u.names[word[start:end]]
		switch {
		case ok:
			e.ids = append(e.ids, id)
		case u.byteTokens != nil:
			for i := end - 1; i >= start; i-- {
				e.ids = append(e.ids, int(u.byteTokens[word[i]]))
			}
		case u.unk < 0:
			e.lost = word[start:end]
		default:
			e.ids = append(e.ids, u.unk)
		}
		end = start
	}
	ids := e.ids[begin:]
	for i, j := 0, len(ids)-1; i < j; i, j = i+1, j-1 {
		ids[i], ids[j] = ids[j], ids[i]
	}
	return e.add()
}

// lowest returns the score of an unknown character, which is the lowest of scores minus unkPenalty.
func lowest(scores []float64) float64 {
	low := math.Inf(1)
	for _, s := range scores {
		low = min(low, s)
	}
	if math.IsInf(low, 1) {
		low = 0
	}
	return low - unkPenalty
}
