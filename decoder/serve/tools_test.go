package serve

import (
	"encoding/json"
	"fmt"
	"testing"

	"gorgonia.org/leanattention/decoder"
)

// TestToolChoice: with tool_choice, an answer is a call with arguments of the function's schema, as a whole and as a stream, or tools are
// left out.
func TestToolChoice(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{Batch: 4, Context: 512})
	const tools = `[{"type": "function", "function": {"name": "crown", "strict": true, "parameters": {"type": "object", "properties": {"kind": {"$ref": "#/$defs/kind"}}, "required": ["kind"],
		"additionalProperties": false, "$defs": {"kind": {"enum": ["king", "queen"]}}}}}, {"type": "function", "function": {"name": "wait"}}]`
	body := func(choice string, seed int) string {
		return fmt.Sprintf(`{"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 60, "temperature": 1, "seed": %d, "n": 2, "tools": %s, "tool_choice": %s`, 7*seed, tools, choice)
	}
	ended, called := 0, map[string]int{}
	for seed := range 6 {
		for _, choice := range []string{`"required"`, `{"type": "function", "function": {"name": "crown"}}`} {
			var c chatCompletion
			r.post("/v1/chat/completions", body(choice, seed)+"}", &c)
			streamed := make([][]toolCall, 2)
			for _, e := range r.events("/v1/chat/completions", body(choice, seed)+`, "stream": true}`) {
				if e != "[DONE]" {
					var c chatCompletion
					strict(t, e, &c)
					x := c.Choices[0]
					streamed[x.Index] = append(streamed[x.Index], x.Delta.Calls...)
				}
			}
			for i, x := range c.Choices {
				if *x.FinishReason == "length" { // the beginning of a call
					continue
				}
				ended++
				if *x.FinishReason != "tool_calls" || len(x.Message.Calls) != 1 || x.Message.Content != nil || len(streamed[i]) != 1 || streamed[i][0].Function != x.Message.Calls[0].Function {
					t.Fatalf("%s: %+v, streamed %+v", choice, x, streamed[i])
				}
				call := x.Message.Calls[0].Function
				called[call.Name]++
				switch {
				case call.Name == "crown":
					var a struct {
						Kind string `json:"kind"`
					}
					if strict(t, call.Arguments, &a); a.Kind != "king" && a.Kind != "queen" {
						t.Errorf("%+v", call)
					}
				case call.Name != "wait" || choice != `"required"` || !json.Valid([]byte(call.Arguments)):
					t.Errorf("%s: %+v", choice, call)
				}
			}
		}
	}
	if ended < 6 || called["crown"] == 0 {
		t.Errorf("%d answers ended: %v", ended, called)
	}
	var without, none chatCompletion
	r.post("/v1/chat/completions", `{"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 4}`, &without)
	r.post("/v1/chat/completions", `{"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 4, "tool_choice": "none", "tools": `+tools+`}`, &none)
	if none.Usage.Prompt != without.Usage.Prompt {
		t.Errorf("tool_choice none: a prompt of %d tokens, want %d", none.Usage.Prompt, without.Usage.Prompt)
	}
}
